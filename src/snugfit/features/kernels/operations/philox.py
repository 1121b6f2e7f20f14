"""Dropout masks by Philox in counter mode, in plain torch, bit for bit those of the programs.

A seed, the number of the call site in the model, the row and the column decide if an element is dropped. So a
backward pass draws the mask of its forward pass again, and stores nothing. A probability is rounded to
1/65,536 (0.1 to 0.100006), and the remaining elements are scaled by the rounded one.
"""

from __future__ import annotations

import torch

LEVELS = 1 << 16
"""Number of equally likely draws; dropout probabilities are multiples of 1 / 65,536."""

# A 128-bit random number has 16 bits for each of eight neighbours.
GROUP = 8
"""Number of adjacent elements of a row that share one 128-bit random number."""

_ROUNDS = 10
# Constants of Philox-4x32 (Salmon et al., SC 2011).
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def threshold(probability: float) -> int:
    """Return the number of 16-bit random values, of 65,536, that drop an element at this dropout
    probability.
    """
    # With a probability of 1 no element is kept, and the scale would be infinite.
    return min(round(probability * LEVELS), LEVELS - 1)


def scale(drops: int) -> float:
    """Return dropout's scale of the remaining elements, if `drops` of 65,536 random values drop one."""
    return LEVELS / (LEVELS - drops)


def keep_mask(seed: torch.Tensor, site: int, rows: int, columns: int, drops: int) -> torch.Tensor:
    """Return True for each remaining element: (rows, columns), bool, on the seed's device. `seed` is one
    int64."""
    groups = -(-columns // GROUP)
    counters = torch.arange(rows * groups, device=seed.device)
    words = _philox(seed, counters, site)
    # The halves are in the order of the Triton program (`keeping.py`).
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    numbers = torch.stack(halves, dim=-1).view(rows, groups * GROUP)[:, :columns]
    return numbers >= drops


def _philox(seed: torch.Tensor, counters: torch.Tensor, site: int) -> tuple[torch.Tensor, ...]:
    """Return four random words of 32 bits for each counter, as int64 (Salmon et al., SC 2011,
    Philox-4x32-10).
    """
    # torch has no unsigned integers of 32 bits, so these are stored in int64.
    # Each row of a tensor is one of two words, so that an operator computes both.
    low, high = seed & _MASK, (seed >> 32) & _MASK
    key = torch.stack([low, high]).view(2, 1)
    key_step = _column(low, *_KEY_STEPS)
    factor = _column(low, _FACTORS[1], _FACTORS[0])
    zeros = torch.zeros_like(counters)
    third_first = torch.stack([zeros, counters & _MASK])
    second_fourth = torch.stack([torch.full_like(counters, site), zeros])
    for _ in range(_ROUNDS):
        product = third_first * factor  # it wraps modulo 2**64, with the bits of an unsigned product
        first_third = ((product >> 32) & _MASK) ^ second_fourth ^ key
        third_first, second_fourth = first_third.flip(0), product & _MASK
        key = (key + key_step) & _MASK
    return third_first[1], second_fourth[0], third_first[0], second_fourth[1]


def _column(like: torch.Tensor, first: int, second: int) -> torch.Tensor:
    """Return two integers as a tensor (2, 1), on the device of `like` and without a copy from the host."""
    return torch.stack([torch.full_like(like, first), torch.full_like(like, second)]).view(2, 1)
