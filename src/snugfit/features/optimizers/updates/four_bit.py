"""AdamW whose moments are 4-bit numbers, in blocks of 128 that share one scale.

A moment is divided by the largest of its block and rounded to the nearest value. Two share a byte. So a
moment of a weight takes half a byte an element and 4 bytes a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from snugfit.features.optimizers.updates.pieces import AdamWInPieces, WeightRows, gather, scatter

BLOCK = 128
"""Number of elements that share a scale (Li et al., section 5)."""

LEAST = 4096
"""Number of elements from which a weight's moments have 4 bits, as for bitsandbytes' 8-bit moments."""

SMALLEST = 1e-30
"""Scale of a block in which all elements are zero."""

NEGATIVE = (-0.8875, -0.6625, -0.4375, -0.2125, -0.0775, -0.0325, -0.0055)
# The values are denser near zero (Dettmers et al., arXiv 2110.02861, section 1.3).
SIGNED = (*NEGATIVE, 0.0, *(-value for value in reversed(NEGATIVE)), 1.0)
"""The sixteen values of a signed 4-bit code: a sign, zeros that encode the power of ten, and a fraction of
that power."""

# The second moment is a divisor, so its values exclude zero (Li et al., arXiv 2309.01507, sections 3 and 4).
UNSIGNED = tuple(step / 16 for step in range(1, 17))

MOMENTS = {"exp_avg": SIGNED, "exp_avg_sq": UNSIGNED}


class CodeTables(NamedTuple):
    """Values of the 4-bit codes, on a device."""

    pairs: torch.Tensor
    """The two values that each byte represents, (256, 2)."""
    borders: torch.Tensor
    """Midpoints between neighbouring values of the code, (15,)."""


class FourBitAdamW(AdamWInPieces):
    """AdamW that keeps both moments in 4 bits."""

    numbers_in_a_block = BLOCK

    def new_state(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the moments of a weight before its first step: codes of zeros, or zeros in 32 bits."""
        # Small weights, and weights whose size is no multiple of a block, keep 32 bits.
        if weight.numel() < LEAST or weight.numel() % BLOCK:
            return {
                name: torch.zeros_like(weight, dtype=torch.float32, memory_format=torch.preserve_format)
                for name in MOMENTS
            }
        state = {}
        for name in MOMENTS:
            state[name] = torch.zeros(weight.numel() // 2, dtype=torch.uint8, device=weight.device)
            state[_scales(name)] = torch.zeros(
                weight.numel() // BLOCK, dtype=torch.float32, device=weight.device
            )
        return state

    def widen(self, piece: Sequence[WeightRows], name: str) -> torch.Tensor:
        """Dequantize a moment: return its values in 32 bits from its 4-bit codes."""
        parts = [rows.state[name] for rows in piece]
        if not _is_packed(piece):
            return gather(parts)
        codes, scales = torch.cat(parts), torch.cat([rows.state[_scales(name)] for rows in piece])
        # A table of 256 pairs gives both values of a byte at once.
        return unpack(codes, scales, self._tables(name, codes.device).pairs)

    def narrow(self, piece: Sequence[WeightRows], moments: tuple[torch.Tensor, ...]) -> None:
        """Quantize both moments: store each value as the 4-bit code of the nearest of sixteen values."""
        for name, exact in zip(MOMENTS, moments, strict=True):
            parts = [rows.state[name] for rows in piece]
            if not _is_packed(piece):
                scatter(exact, parts)
                continue
            codes, scales = pack(exact, self._tables(name, exact.device).borders)
            _scatter(codes, parts)
            _scatter(scales, [rows.state[_scales(name)] for rows in piece])

    def _tables(self, name: str, device: torch.device) -> CodeTables:
        # A state dict must not contain the tables, so they are not part of the optimizer state.
        known = self.__dict__.setdefault("_known_tables", {})
        if (name, device) not in known:
            known[name, device] = tables_of(MOMENTS[name], device)
        tables: CodeTables = known[name, device]
        return tables


def _scales(name: str) -> str:
    return f"{name}_scales"


def _is_packed(piece: Sequence[WeightRows]) -> bool:
    return _scales("exp_avg") in piece[0].state


def _scatter(flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    torch._foreach_copy_(list(parts), list(flat.split([part.numel() for part in parts])))


def tables_of(values: Sequence[float], device: torch.device) -> CodeTables:
    """Return the sixteen values of the 4-bit codes on this device, ascending.

    They are filled on the device, so that it waits for no copy.
    """
    known = torch.empty(len(values), device=device)
    for value, number in zip(values, known, strict=True):
        number.fill_(value)
    square = len(values), len(values)
    pairs = torch.stack([known[:, None].expand(square), known.expand(square)], dim=-1).view(-1, 2)
    return CodeTables(pairs, (known[1:] + known[:-1]).mul_(0.5))


def pack(exact: torch.Tensor, borders: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a tensor: return 4-bit codes, two in a byte, and a scale for each block."""
    blocks = exact.view(-1, BLOCK)
    scales = torch.linalg.vector_norm(blocks, ord=math.inf, dim=1).clamp_(min=SMALLEST)
    # The index of the interval between midpoints is the code of the nearest value.
    nearest = torch.bucketize(blocks / scales[:, None], borders, out_int32=True).view(-1, 2)
    # The first value of a pair is in the upper four bits.
    return nearest[:, 0].mul(16).add_(nearest[:, 1]).to(torch.uint8), scales


def unpack(codes: torch.Tensor, scales: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Return the fp32 numbers for packed 4-bit codes and the scales of their blocks."""
    values = torch.index_select(pairs, 0, codes.int()).view(-1, BLOCK)
    return values.mul_(scales[:, None]).view(-1)
