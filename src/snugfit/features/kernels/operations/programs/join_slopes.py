"""Triton kernel of `kernels/join_slopes.py`: it copies blocks of the gradients of queries, keys and values
into one tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from snugfit.features.kernels.operations.join_slopes import BLOCK_COLUMNS, BLOCK_ROWS

if TYPE_CHECKING:
    import torch


@triton.jit(do_not_specialize=("rows",))  # type: ignore[untyped-decorator]
def copy_columns(  # type: ignore[no-untyped-def]
    first, second, third, joint, partials, rows, columns,
    SUMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Triton kernel: copy some columns of every n-th block of rows (n programs), and add them up."""
    part = tl.program_id(2)
    source = first
    if part == 1:
        source = second
    if part == 2:
        source = third
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        slope = tl.load(source + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
        # A row of the result has the three parts one after the other.
        to = row[:, None] * (3 * columns) + (part * columns + column)[None, :]
        tl.store(joint + to, slope, mask=inside)
        if SUMS:
            total += tl.sum(slope.to(tl.float32), 0)
    if SUMS:
        to = tl.program_id(0) * 3 * columns + part * columns + column
        tl.store(partials + to, total, mask=column < columns)


def copy_slopes(
    first: torch.Tensor,
    second: torch.Tensor,
    third: torch.Tensor,
    *,
    joint: torch.Tensor,
    partials: torch.Tensor | None,
) -> None:
    """Write three gradients (..., N) as one (rows, 3 N), and partial column sums (1, P, 3 N)."""
    columns = first.size(-1)
    rows = joint.size(0)
    programs = triton.cdiv(rows, BLOCK_ROWS) if partials is None else partials.size(1)
    copy_columns[(programs, triton.cdiv(columns, BLOCK_COLUMNS), 3)](
        first, second, third, joint, partials, rows, columns,
        SUMS=partials is not None, ROWS=BLOCK_ROWS, COLUMNS=BLOCK_COLUMNS, num_warps=4,
    )  # fmt: skip
