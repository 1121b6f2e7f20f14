"""The Triton kernels of `kernels/add_norm.py`: whole rows at a time, computed in fp32.

A forward program processes one row or a few small ones. In the backward pass there are as many programs as
rows of partial sums. They take rows in turns, and each adds up its own rows' shares of the gradients of
weight, shift and bias.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from snugfit.features.kernels.operations.add_norm import rows_at_once
from snugfit.features.kernels.operations.philox import scale

if TYPE_CHECKING:
    import torch

WARPS = 4
"""Number of warps in one program of the backward kernel. With 8 it took twice as long (dev/log.md)."""

FORWARD_TILE = 1024
"""Number of elements that one program of the forward kernel processes at a time (chosen)."""

VARYING = ("rows", "residual_rows", "site", "drops")
"""Arguments of kernels whose values do not trigger a new compilation."""


@triton.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def norm_forward(  # type: ignore[no-untyped-def]
    x, residual, weight, shift, bias, seed, y, stream, total, statistics,
    rows, columns, residual_rows, site, drops, factor, eps,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, STREAM: tl.constexpr, SUM: tl.constexpr, DROPS: tl.constexpr,
    DROPS_LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Triton kernel: write some rows of the norm, of the stream, of the sum, and of the statistics (2,
    rows)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    has_column = column < columns
    inside = (row < rows)[:, None] & has_column[None, :]
    # Offsets of large tensors exceed 32 bits.
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + column, mask=has_column, other=0.0).to(tl.float32)[None, :]
    if DROPS and not DROPS_LAST:
        value = tl.where(keep_tile(seed, site, row, columns, drops, ROWS, COLUMNS, 0), value * factor, 0.0)
    if RESIDUAL:
        from_row = (row % residual_rows).to(tl.int64)
        other = residual + from_row[:, None] * columns + column[None, :]
        value += tl.load(other, mask=inside, other=0.0).to(tl.float32)
    # Before rounding, because the statistics are those of the exact sum.
    if SUM:
        tl.store(total + at, value, mask=inside)
    # Elements of the tile outside of a row must not count in the row's sums.
    value = tl.where(inside, value, 0.0)
    mean = tl.sum(value, 1) / columns
    # The variance is computed from centred values, which is more exact than a difference of squares.
    centred = tl.where(inside, value - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / columns + eps)
    tl.store(statistics + row, mean, mask=row < rows)
    tl.store(statistics + rows + row, inverse, mask=row < rows)
    gain = tl.load(weight + column, mask=has_column, other=0.0).to(tl.float32)
    offset = tl.load(shift + column, mask=has_column, other=0.0).to(tl.float32)
    result = centred * inverse[:, None] * gain[None, :] + offset[None, :]
    if DROPS and DROPS_LAST:
        result = tl.where(keep_tile(seed, site, row, columns, drops, ROWS, COLUMNS, 0), result * factor, 0.0)
    tl.store(y + at, result, mask=inside)
    if STREAM:
        tl.store(stream + at, result, mask=inside)


@triton.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def norm_backward(  # type: ignore[no-untyped-def]
    dy, dstream, dtotal, total, statistics, weight, seed, dresidual, dx, partials,
    rows, columns, site, drops, factor,
    STREAM_SLOPE: tl.constexpr, SUM_SLOPE: tl.constexpr, DROPS: tl.constexpr, DROPS_LAST: tl.constexpr,
    APART: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Triton kernel: write the gradients of every n-th block of rows, n the number of programs, and their
    column sums.

    The sums are the gradients of weight (the first of SUMS), shift and bias.
    """
    column = tl.arange(0, COLUMNS)
    has_column = column < columns
    gain = tl.load(weight + column, mask=has_column, other=0.0).to(tl.float32)
    of_weight = tl.zeros((COLUMNS,), tl.float32)
    of_shift = tl.zeros((COLUMNS,), tl.float32)
    of_bias = tl.zeros((COLUMNS,), tl.float32)
    # Programs process rows in turn, so that each keeps its part of the column sums in registers.
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & has_column[None, :]
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        slope = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        if STREAM_SLOPE:
            slope += tl.load(dstream + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(statistics + row, mask=row < rows, other=0.0)
        inverse = tl.load(statistics + rows + row, mask=row < rows, other=0.0)
        if DROPS:
            keep = keep_tile(seed, site, row, columns, drops, ROWS, COLUMNS, 0)
            if DROPS_LAST:
                slope = tl.where(keep, slope * factor, 0.0)
        normed = tl.where(inside, (value - mean[:, None]) * inverse[:, None], 0.0)
        inner = slope * gain[None, :]
        level = tl.sum(inner, 1) / columns
        tilt = tl.sum(inner * normed, 1) / columns
        # Gradient through a norm: its mean and its projection on the normed row are subtracted.
        through = (inner - level[:, None] - normed * tilt[:, None]) * inverse[:, None]
        if SUM_SLOPE:
            through += tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
        through = tl.where(inside, through, 0.0)
        # The residual's gradient is stored before dropout, which only applies to the branch.
        tl.store(dresidual + at, through, mask=inside)
        if DROPS and not DROPS_LAST:
            through = tl.where(keep, through * factor, 0.0)
        if APART:
            tl.store(dx + at, through, mask=inside)
        if SUMS:
            of_weight += tl.sum(slope * normed, 0)
            of_shift += tl.sum(slope, 0)
        if SUMS == 3:
            of_bias += tl.sum(through, 0)
    if SUMS:
        target = partials + tl.program_id(0) * columns + column
        size = tl.num_programs(0) * columns
        tl.store(target, of_weight, mask=has_column)
        tl.store(target + size, of_shift, mask=has_column)
        if SUMS == 3:
            tl.store(target + 2 * size, of_bias, mask=has_column)


def _width(columns: int) -> int:
    """Return the width of a tile: a power of two, and at least the elements of one random number."""
    # One random number decides for eight neighbours.
    return max(8, int(triton.next_power_of_2(columns)))


def add_norm_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    shift: torch.Tensor,
    bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    site: int,
    drops: int,
    drops_last: bool,
    eps: float,
    *,
    y: torch.Tensor,
    stream: torch.Tensor | None,
    total: torch.Tensor | None,
    statistics: torch.Tensor,
) -> None:
    """Write the result, its fp32 stream, the sum and the statistics (2, rows) of a forward pass.

    Result, stream and sum are shaped as `x` (..., H). The stream is optional; the sum is None where it is
    `x`.
    """
    columns = x.size(-1)
    rows, width = x.numel() // columns, _width(columns)
    repeats = rows if residual is None else residual.numel() // columns
    at_once = max(1, FORWARD_TILE // width)
    norm_forward[(triton.cdiv(rows, at_once),)](
        x, residual, weight, shift, bias, seed, y, stream, total, statistics,
        rows, columns, repeats, site, drops, scale(drops), eps,
        BIAS=bias is not None, RESIDUAL=residual is not None, STREAM=stream is not None,
        SUM=total is not None, DROPS=seed is not None, DROPS_LAST=drops_last, ROWS=at_once, COLUMNS=width,
        num_warps=4 if width <= 2048 else 8,
    )  # fmt: skip


def add_norm_backward(
    dy: torch.Tensor,
    dstream: torch.Tensor | None,
    dtotal: torch.Tensor | None,
    total: torch.Tensor,
    statistics: torch.Tensor,
    weight: torch.Tensor,
    seed: torch.Tensor | None,
    site: int,
    drops: int,
    drops_last: bool,
    *,
    dresidual: torch.Tensor,
    dx: torch.Tensor | None,
    partials: torch.Tensor | None,
) -> None:
    """Write the gradients of the residual and of `x`, and partial sums (2 or 3, P, H).

    The gradient of `x` is separate where dropout or a dtype distinguishes it from the residual's.
    """
    columns = total.size(-1)
    rows, at_once = total.numel() // columns, rows_at_once(columns)
    programs = triton.cdiv(rows, at_once) if partials is None else partials.size(1)
    norm_backward[(programs,)](
        dy, dstream, dtotal, total, statistics, weight, seed, dresidual, dx, partials,
        rows, columns, site, drops, scale(drops),
        STREAM_SLOPE=dstream is not None, SUM_SLOPE=dtotal is not None, DROPS=seed is not None,
        DROPS_LAST=drops_last, APART=dx is not None, SUMS=0 if partials is None else partials.size(0),
        ROWS=at_once, COLUMNS=_width(columns), num_warps=WARPS,
    )  # fmt: skip


# ---- dropout masks in programs: the bits that `philox.keep_mask` draws in plain torch ---------------------


@triton.jit  # type: ignore[untyped-decorator]
def keep_tile(seed, site, rows, columns, drops, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BEGIN):  # type: ignore[no-untyped-def]
    """Return the mask of the kept elements of a tile, (ROWS, COLUMNS).

    `rows` (ROWS) are the indices of its rows. `BEGIN` is its first column, a multiple of 8. `columns` is the
    width of a row, and `seed` an address. A row has a random number for each 8 columns.
    """
    GROUPS: tl.constexpr = COLUMNS // 8
    groups = BEGIN // 8 + tl.arange(0, GROUPS)
    # A counter per group of eight columns, as in `philox.py`.
    counters = rows[:, None] * ((columns + 7) // 8) + groups[None, :]
    zeros = counters * 0
    first, second, third, fourth = tl.philox(tl.load(seed), counters, zeros + site, zeros, zeros)
    # Joins interleave the words, so that neighbours are in the order of `philox.py`.
    even = tl.join(tl.join(first & 0xFFFF, third & 0xFFFF), tl.join(second & 0xFFFF, fourth & 0xFFFF))
    odd = tl.join(tl.join(first >> 16, third >> 16), tl.join(second >> 16, fourth >> 16))
    numbers = tl.reshape(tl.join(even, odd), (ROWS, COLUMNS))
    return numbers.to(tl.int32) >= drops
