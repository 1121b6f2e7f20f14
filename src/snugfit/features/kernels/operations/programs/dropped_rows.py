"""Dropout of rows in Triton: elements whose draw is below a threshold become zero, or are not added.

A product that is added is computed in registers, a tile at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from snugfit.features.kernels.operations.programs.add_norm import keep_tile

if TYPE_CHECKING:
    import torch

BLOCK = 1024
"""Largest number of elements of a row in one kernel program (chosen)."""

TILE = (64, 64)
"""Numbers of rows and columns of a product in one kernel program (chosen)."""

WARPS = 4

MOST_INNER = 64
"""Largest number of columns of factors that are multiplied at a time (chosen)."""


@triton.jit(do_not_specialize=("site", "drops"))  # type: ignore[untyped-decorator]
def drop_row(rows, into, seed, columns, site, drops, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Triton kernel: write a part of one row, with zeros for dropped elements."""
    row, begin = tl.program_id(0), tl.program_id(1) * BLOCK
    column = begin + tl.arange(0, BLOCK)
    inside = column < columns
    # Offsets of large tensors exceed 32 bits.
    at = row.to(tl.int64) * columns + column
    keep = keep_tile(seed, site, row + tl.arange(0, 1), columns, drops, 1, BLOCK, begin)
    value = tl.load(rows + at, mask=inside, other=0.0)
    value = tl.where(tl.reshape(keep, (BLOCK,)), value, 0.0)
    tl.store(into + at, value.to(into.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def product_tile(  # type: ignore[no-untyped-def]
    left, right, row, column, rows, columns, left_row, right_row, right_inner,
    INNER: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return a tile (ROWS, COLUMNS) of left @ right.T, whose elements are sums of `INNER` products, in a
    Triton program.
    """
    values = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, INNER, BLOCK):
        inner = first + tl.arange(0, BLOCK)
        mask = (row[:, None] < rows) & (inner[None, :] < INNER)
        one = tl.load(left + row[:, None] * left_row + inner[None, :], mask=mask, other=0.0)
        mask = (inner[:, None] < INNER) & (column[None, :] < columns)
        at = column[None, :].to(tl.int64) * right_row + inner[:, None] * right_inner
        other = tl.load(right + at, mask=mask, other=0.0)
        values = tl.dot(one, other, acc=values, input_precision="ieee")
    return values


@triton.jit(do_not_specialize=("site", "drops"))  # type: ignore[untyped-decorator]
def add_tile(  # type: ignore[no-untyped-def]
    into, left, right, seed, rows, columns, left_row, right_row, right_inner, site, drops,
    INNER: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Triton kernel: add a tile of left @ right.T, but for dropped elements."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    begin = tl.program_id(0) * COLUMNS
    column = begin + tl.arange(0, COLUMNS)
    product = product_tile(
        left, right, row, column, rows, columns, left_row, right_row, right_inner, INNER, BLOCK, ROWS,
        COLUMNS,
    )  # fmt: skip
    keep = keep_tile(seed, site, row, columns, drops, ROWS, COLUMNS, begin)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    # Offsets of large tensors exceed 32 bits.
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    value = tl.load(into + at, mask=inside, other=0.0).to(tl.float32) + tl.where(keep, product, 0.0)
    tl.store(into + at, value.to(into.dtype.element_ty), mask=inside)


def drop_rows(rows: torch.Tensor, seed: torch.Tensor, site: int, drops: int, *, out: torch.Tensor) -> None:
    """Launch the kernel that writes the remaining elements of rows (T, H), and zeros."""
    columns = rows.size(1)
    # One random number decides for eight neighbours.
    block = min(BLOCK, max(8, int(triton.next_power_of_2(columns))))
    drop_row[(len(rows), triton.cdiv(columns, block))](
        rows, out, seed, columns, site, drops, BLOCK=block, num_warps=4
    )


def add_dropped_product(
    into: torch.Tensor, left: torch.Tensor, right: torch.Tensor, seed: torch.Tensor, site: int, drops: int
) -> None:
    """Launch the kernel that adds the remaining elements of left @ right.T, (T, k) and (H, k), to `into`."""
    (rows, columns), inner = into.shape, left.size(1)
    # A tensor core multiplies at least 16 columns.
    block = min(MOST_INNER, max(16, int(triton.next_power_of_2(inner))))
    add_tile[(triton.cdiv(columns, TILE[1]), triton.cdiv(rows, TILE[0]))](
        into, left, right, seed, rows, columns, left.stride(0), *right.stride(), site, drops, INNER=inner,
        BLOCK=block, ROWS=TILE[0], COLUMNS=TILE[1], num_warps=WARPS,
    )  # fmt: skip
