"""The Triton kernels of `kernels/bias_gelu.py`: a block of rows and columns at a time, computed in fp32.

The exact form needs the normal distribution's share below a value, and backward its density too. Both come
from one exponential here: with the library's `erf` the kernels computed for longer than they moved bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from snugfit.features.kernels.operations.bias_gelu import BLOCK_COLUMNS, BLOCK_ROWS

if TYPE_CHECKING:
    import torch

WARPS = 4
"""Number of warps in one kernel program. With 8 the backward kernel took twice as long (dev/log.md)."""


@triton.jit
def tanh(value):  # type: ignore[no-untyped-def]
    """Return tanh of a tile, by the exponential, which is zero or infinite where tanh is one."""
    return 1.0 - 2.0 / (tl.exp(2.0 * value) + 1.0)


@triton.jit
def share_below(value):  # type: ignore[no-untyped-def]
    """Return the normal distribution's cumulative probability at `value`, and exp(-value * value / 2), a
    factor of its density.

    The formula is Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26. Its error is at most
    1.5e-7 of erf, so half of that of the share. That is about a unit in the last place of fp32 near one.
    """
    height = tl.exp(-0.5 * value * value)
    # 0.7071 is 1 / sqrt(2): the formula (Abramowitz and Stegun, 7.1.26) is for erf.
    t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(value))
    bent = 1.061405429 * t - 1.453152027
    bent = bent * t + 1.421413741
    bent = bent * t - 0.284496736
    bent = bent * t + 0.254829592
    # Below zero the small tail is used directly, which is more exact.
    tail = 0.5 * bent * t * height
    return tl.where(value < 0.0, tail, 1.0 - tail), height


@triton.jit(do_not_specialize=("rows",))  # type: ignore[untyped-decorator]
def gelu_forward(x, bias, y, rows, columns, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Triton kernel: write GELU of a block of `x + bias`."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    shift = tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + shift[None, :]
    if TANH:
        # 0.7979 is sqrt(2 / pi), from GELU's approximation by tanh.
        share = 0.5 * (1.0 + tanh(0.7978845608028654 * (value + 0.044715 * value * value * value)))
    else:
        share, _ = share_below(value)
    tl.store(y + at, value * share, mask=inside)


@triton.jit(do_not_specialize=("rows",))  # type: ignore[untyped-decorator]
def gelu_backward(  # type: ignore[no-untyped-def]
    dy, x, bias, dx, partials, rows, columns,
    TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Triton kernel: write gradients of some columns of every n-th block of rows (n programs), and their
    sums."""
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
            # The derivative of the argument of tanh; 0.134145 is three times 0.044715.
            inner = 0.7978845608028654 * (1.0 + 0.134145 * value * value)
            slope = 0.5 * (1.0 + bent) + 0.5 * value * (1.0 - bent * bent) * inner
        else:
            share, height = share_below(value)
            # 0.3989 is 1 / sqrt(2 pi), the maximum of the normal density.
            slope = share + value * (0.3989422804014327 * height)
        result = above * slope
        tl.store(dx + at, result, mask=inside)
        total += tl.sum(result, 0)
    tl.store(partials + tl.program_id(0) * columns + column, total, mask=column < columns)


def bias_gelu_forward(x: torch.Tensor, bias: torch.Tensor, by_tanh: bool, *, y: torch.Tensor) -> None:
    """Launch the kernel that writes GELU of `x` (..., H) plus `bias` (H) to `y`."""
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
    """Launch the kernel that writes the gradient of `x`, and each program's part of that of `bias` (1, P,
    H)."""
    columns = x.size(-1)
    rows = x.numel() // columns
    gelu_backward[(partials.size(1), triton.cdiv(columns, BLOCK_COLUMNS))](
        dy, x, bias, dx, partials, rows, columns, TANH=by_tanh, ROWS=BLOCK_ROWS, COLUMNS=BLOCK_COLUMNS,
        num_warps=WARPS,
    )  # fmt: skip
