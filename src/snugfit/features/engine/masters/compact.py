"""Storage of AdamW's moments as 8-bit codes, in groups of elements that share an fp32 scale.

The scale of a group is its largest absolute moment. Each element has a whole number as code, from which its
fraction of the scale is computed. For the first moment the code is -127 to 127. The fraction is the square of
code / 127, with the code's sign. For the second moment it is 0 to 255. The fraction is the fourth power of
code / 255. Codes are thus closer together near zero, where most moments of a group are.

In one step, the second moment changes by about a thousandth. Rounded to the nearest code it would never
change. Both moments are therefore rounded stochastically to one of the two neighbouring codes, the nearer one
with the higher probability.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

GROUP = 64
"""Number of elements of an 8-bit moment that share a scale."""

FIRST_TOP = 127
SECOND_TOP = 255
"""The largest 8-bit codes of first and second moments."""

STRIDE = 0x9E3779B9
"""Factor of the step's number in the hash, which makes the bits of successive steps differ: 2^32 by the
golden ratio."""

MIXES = (0x7FEB352D, 0x846CA68B)
"""Multipliers of the hash that gives random bits (Wellons, "Prospecting for Hash Functions", 2018)."""

SMALLEST = 1.2e-38
"""Smallest scale whose reciprocal is an fp32 number. A group with a smaller scale becomes zeros."""

_ALL = 0xFFFFFFFF


DRAW_BITS = 8
"""Number of random bits with which 24-bit weights are rounded."""


class RoundingDraws(NamedTuple):
    """Random numbers between 0 and 1 for stochastic rounding: two per element, one for each moment."""

    first: torch.Tensor
    second: torch.Tensor


def chances(begin: int, count: int, step: int, device: torch.device) -> RoundingDraws:
    """Return the random numbers for `count` elements of a weight from index `begin` on, in the optimizer step
    of this number.
    """
    # A hash of the step is used instead of a random generator. A step repeated from a checkpoint gives the
    # same bits, on CPU and GPU.
    bits = _hash(begin, count, step, device)
    return RoundingDraws(_share(bits & 0xFFFF), _share(bits >> 16))


def draws(begin: int, count: int, step: int, device: torch.device) -> torch.Tensor:
    """Return random integers from 0 to 255, int32, to round the same elements' weights in this step. They are
    the highest bits of the hash times the golden ratio. So they are not determined by the random numbers of
    one moment alone.
    """
    bits = _hash(begin, count, step, device)
    return bits.mul_(STRIDE).bitwise_and_(_ALL).bitwise_right_shift_(32 - DRAW_BITS).to(torch.int32)


def _hash(begin: int, count: int, step: int, device: torch.device) -> torch.Tensor:
    """Return a 32-bit random hash for each of these elements of a weight, as int64."""
    bits = torch.arange(begin, begin + count, dtype=torch.int64, device=device)
    bits.add_(step * STRIDE).bitwise_and_(_ALL)
    # torch has few operators for unsigned integers. The 32 bits are in int64, and overflow is cut off after
    # each product.
    bits ^= bits >> 16
    bits.mul_(MIXES[0]).bitwise_and_(_ALL)
    bits ^= bits >> 15
    bits.mul_(MIXES[1]).bitwise_and_(_ALL)
    bits ^= bits >> 16
    return bits


def _share(bits: torch.Tensor) -> torch.Tensor:
    # Adding half a unit keeps each random number strictly between 0 and 1.
    return bits.to(torch.float32).add_(0.5).mul_(1.0 / 65536)


def cut_in_groups(numbers: torch.Tensor) -> torch.Tensor:
    """Reshape a flat tensor to rows of one quantization group each (N, `GROUP`), padded with zeros."""
    # The last group may be incomplete. The zeros that fill it never change the group's maximum.
    return torch.nn.functional.pad(numbers, (0, -numbers.numel() % GROUP)).view(-1, GROUP)


def scale_count(elements: int) -> int:
    """Return the number of quantization groups of this many elements."""
    return -(-elements // GROUP)


def widen_first(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize first moments: return fp32 (N,) from 8-bit codes (N,) and their groups' scales."""
    wide = cut_in_groups(codes.to(torch.float32))
    share = scales.unsqueeze(1) * (1.0 / FIRST_TOP**2)
    return (wide * wide.abs() * share).flatten()[: codes.numel()]


def widen_second(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize second moments: return fp32 (N,) from 8-bit codes (N,) and their groups' scales."""
    square = cut_in_groups(codes.to(torch.float32)).square_()
    share = scales.unsqueeze(1) * (1.0 / SECOND_TOP**4)
    return (square * square * share).flatten()[: codes.numel()]


def narrow_first(
    exact: torch.Tensor, chance: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """Quantize fp32 first moments (N,): write 8-bit codes (N,) and scales, rounded stochastically."""
    sizes = cut_in_groups(exact.abs())
    shares = _shares(sizes, scales) * FIRST_TOP**2
    below = shares.sqrt().floor_()
    # Codes represent squares, and the distance from `below ** 2` to the next square is 2 * below + 1.
    above = cut_in_groups(chance) * (2.0 * below + 1.0) < shares - below * below
    whole = (below + above.to(torch.float32)).clamp_(max=FIRST_TOP).flatten()[: codes.numel()]
    codes.copy_(torch.where(exact < 0, -whole, whole))


def narrow_second(
    exact: torch.Tensor, chance: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """Quantize fp32 second moments (N,): write 8-bit codes (N,) and scales, rounded stochastically."""
    sizes = cut_in_groups(exact)
    shares = _shares(sizes, scales) * float(SECOND_TOP**4)
    below = shares.sqrt().sqrt_().floor_()
    low, next_one = below * below, (below + 1.0) * (below + 1.0)
    low, high = low * low, next_one * next_one
    # The probability of rounding up is linear in the value. The expected result is thus exact, although the
    # codes are not evenly spaced.
    above = cut_in_groups(chance) * (high - low) < shares - low
    whole = (below + above.to(torch.float32)).clamp_(max=SECOND_TOP)
    # A positive second moment must not become zero, because the update divides by its square root.
    codes.copy_(torch.where(sizes > 0, whole.clamp_(min=1.0), whole).flatten()[: codes.numel()])


def _shares(sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return each element divided by the largest of its group, and write the largest element as the group's
    scale.
    """
    largest = sizes.amax(1)
    scales.copy_(largest)
    # A smaller scale has no fp32 reciprocal, so its group becomes zeros.
    reciprocal = torch.where(largest > SMALLEST, 1.0 / largest, 0.0)
    return sizes * reciprocal.unsqueeze(1)
