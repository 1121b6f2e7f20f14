"""Dropout of rows in Triton: elements whose draw is below a threshold become zero, or are not added."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from snugfit.features.kernels.operations.programs.add_norm import keep_tile

if TYPE_CHECKING:
    import torch

BLOCK = 1024
"""Largest number of elements of a row in one kernel program (chosen)."""


@triton.jit(do_not_specialize=("site", "drops"))  # type: ignore[untyped-decorator]
def drop_row(  # type: ignore[no-untyped-def]
    rows, into, seed, columns, site, drops, ADDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Triton kernel: write or add a part of one row, with zeros for dropped elements."""
    row, begin = tl.program_id(0), tl.program_id(1) * BLOCK
    column = begin + tl.arange(0, BLOCK)
    inside = column < columns
    # Offsets of large tensors exceed 32 bits.
    at = row.to(tl.int64) * columns + column
    keep = keep_tile(seed, site, row + tl.arange(0, 1), columns, drops, 1, BLOCK, begin)
    value = tl.load(rows + at, mask=inside, other=0.0)
    value = tl.where(tl.reshape(keep, (BLOCK,)), value, 0.0)
    if ADDS:
        value = value.to(tl.float32) + tl.load(into + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(into + at, value.to(into.dtype.element_ty), mask=inside)


def drop_rows(rows: torch.Tensor, seed: torch.Tensor, site: int, drops: int, *, out: torch.Tensor) -> None:
    """Launch the kernel that writes the remaining elements of rows (T, H), and zeros."""
    _launch(rows, out, seed, site, drops, adds=False)


def add_dropped_rows(
    into: torch.Tensor, rows: torch.Tensor, seed: torch.Tensor, site: int, drops: int
) -> None:
    """Launch the kernel that adds the remaining elements of rows (T, H) to `into`."""
    _launch(rows, into, seed, site, drops, adds=True)


def _launch(
    rows: torch.Tensor, into: torch.Tensor, seed: torch.Tensor, site: int, drops: int, *, adds: bool
) -> None:
    columns = rows.size(1)
    # One random number decides for eight neighbours.
    block = min(BLOCK, max(8, int(triton.next_power_of_2(columns))))
    drop_row[(len(rows), triton.cdiv(columns, block))](
        rows, into, seed, columns, site, drops, ADDS=adds, BLOCK=block, num_warps=4
    )
