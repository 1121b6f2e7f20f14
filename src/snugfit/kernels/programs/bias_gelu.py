"""The kernels of `kernels/bias_gelu.py`: a block of rows and columns at a time, computed in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from snugfit.kernels.bias_gelu import BLOCK_COLUMNS, BLOCK_ROWS

if TYPE_CHECKING:
    import torch

WARPS = 4
"""Warps of 32 threads of one program: with 8 the backward kernel took twice as long (docs/log.md)."""


@triton.jit
def tanh(value):  # type: ignore[no-untyped-def]
    """By the exponential, which becomes zero or infinite where tanh is one."""
    return 1.0 - 2.0 / (tl.exp(2.0 * value) + 1.0)


@triton.jit(do_not_specialize=("rows",))  # type: ignore[untyped-decorator]
def gelu_forward(x, bias, y, rows, columns, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of the result."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    shift = tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + shift[None, :]
    if TANH:
        share = 0.5 * (1.0 + tanh(0.7978845608028654 * (value + 0.044715 * value * value * value)))
    else:
        share = 0.5 * (1.0 + tl.erf(value * 0.7071067811865476))
    tl.store(y + at, value * share, mask=inside)


@triton.jit(do_not_specialize=("rows",))  # type: ignore[untyped-decorator]
def gelu_backward(  # type: ignore[no-untyped-def]
    dy, x, bias, dx, partials, rows, columns,
    TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of every so-many-th block of rows, and the sums of their gradients."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    shift = tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + shift[None, :]
        above = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        if TANH:
            bent = tanh(0.7978845608028654 * (value + 0.044715 * value * value * value))
            inner = 0.7978845608028654 * (1.0 + 0.134145 * value * value)
            slope = 0.5 * (1.0 + bent) + 0.5 * value * (1.0 - bent * bent) * inner
        else:
            density = 0.3989422804014327 * tl.exp(-0.5 * value * value)
            slope = 0.5 * (1.0 + tl.erf(value * 0.7071067811865476)) + value * density
        result = above * slope
        tl.store(dx + at, result, mask=inside)
        total += tl.sum(result, 0)
    tl.store(partials + tl.program_id(0) * columns + column, total, mask=column < columns)


def bias_gelu_forward(x: torch.Tensor, bias: torch.Tensor, by_tanh: bool, *, y: torch.Tensor) -> None:
    """Writes GELU of `x` (..., H) plus `bias` (H)."""
    columns = x.size(-1)
    rows = x.numel() // columns
    gelu_forward[(triton.cdiv(rows, BLOCK_ROWS), triton.cdiv(columns, BLOCK_COLUMNS))](
        x, bias, y, rows, columns, TANH=by_tanh, ROWS=BLOCK_ROWS, COLUMNS=BLOCK_COLUMNS, num_warps=WARPS
    )


def bias_gelu_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor,
    by_tanh: bool,
    *,
    dx: torch.Tensor,
    partials: torch.Tensor,
) -> None:
    """Writes the gradient of `x`, and of `bias` a part for each program (1, P, H)."""
    columns = x.size(-1)
    rows = x.numel() // columns
    gelu_backward[(partials.size(1), triton.cdiv(columns, BLOCK_COLUMNS))](
        dy, x, bias, dx, partials, rows, columns, TANH=by_tanh, ROWS=BLOCK_ROWS, COLUMNS=BLOCK_COLUMNS,
        num_warps=WARPS,
    )  # fmt: skip
