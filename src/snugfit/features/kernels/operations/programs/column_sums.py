"""Triton kernel that adds the partial sums of another kernel's programs: (K, P, columns) to (K, columns)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

COLUMNS, ROWS = 16, 64
"""Numbers of columns and rows that one kernel program sums at a time (chosen)."""


@triton.jit(do_not_specialize=("count",))  # type: ignore[untyped-decorator]
def add_columns(partials, sums, count, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Triton kernel: add up `count` rows of some columns of one of the K tensors."""
    # Offsets of large tensors exceed 32 bits.
    part = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, count, ROWS):
        inside = ((start + row) < count)[:, None] & (column < columns)[None, :]
        at = (part * count + start + row)[:, None] * columns + column[None, :]
        total += tl.load(partials + at, mask=inside, other=0.0)
    tl.store(sums + part * columns + column, tl.sum(total, 0), mask=column < columns)


def column_sums(partials: torch.Tensor, *, sums: torch.Tensor) -> None:
    """Write the sums (K, columns) of `partials` (K, P, columns) over P."""
    kinds, count, columns = partials.shape
    add_columns[(triton.cdiv(columns, COLUMNS), kinds)](
        partials, sums, count, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4
    )
