"""Rows whose columns are multiplied by a factor each, with a bias, in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

ROWS, COLUMNS = 4, 1024
"""Numbers of rows and columns that one kernel program processes at a time (chosen)."""

WARPS = 4


@triton.jit(do_not_specialize=("rows",))  # type: ignore[untyped-decorator]
def scale_tile(  # type: ignore[no-untyped-def]
    product, factor, bias, out, rows, columns, ADDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Triton kernel: write a tile of product * factor + bias."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    value = tl.load(product + at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.load(factor + column, mask=column < columns, other=0.0)[None, :]
    if ADDS:
        value += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("rows",))  # type: ignore[untyped-decorator]
def scale_tile_backward(  # type: ignore[no-untyped-def]
    of_out, product, factor, of_product, partials, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Triton kernel: write gradients of some columns of every n-th block of rows (n programs), and a row of
    sums for the gradient of the factor.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    scale = tl.load(factor + column, mask=column < columns, other=0.0)[None, :]
    total = tl.zeros((COLUMNS,), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        slope = tl.load(of_out + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(product + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(of_product + at, (slope * scale).to(of_product.dtype.element_ty), mask=inside)
        total += tl.sum(slope * value, 0)
    tl.store(partials + tl.program_id(0) * columns + column, total, mask=column < columns)


def scale_columns(
    product: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor | None, *, out: torch.Tensor
) -> None:
    """Launch the kernel that writes product (T, N) times factor (N,) plus bias (N,)."""
    rows, columns = product.shape
    # Without a bias the kernel reads none, so any pointer is valid.
    scale_tile[(triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))](
        product, factor, factor if bias is None else bias, out, rows, columns, ADDS=bias is not None,
        ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip


def scale_columns_backward(
    of_out: torch.Tensor,
    product: torch.Tensor,
    factor: torch.Tensor,
    *,
    of_product: torch.Tensor,
    partials: torch.Tensor,
) -> None:
    """Launch the kernel that writes the gradient of the product, and each program's part of that of the
    factor (1, P, N).
    """
    rows, columns = product.shape
    scale_tile_backward[(partials.size(1), triton.cdiv(columns, COLUMNS))](
        of_out, product, factor, of_product, partials, rows, columns, ROWS=ROWS, COLUMNS=COLUMNS,
        num_warps=WARPS,
    )  # fmt: skip
