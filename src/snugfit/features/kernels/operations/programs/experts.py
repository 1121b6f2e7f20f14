"""Kernels of experts in Triton: gated activations with the weights of rows, and sums of a token's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from snugfit.features.kernels.operations.programs.gated import activate, sigmoid

if TYPE_CHECKING:
    import torch

BLOCK = 1024
"""Largest number of elements of a row that a kernel program handles at once (chosen)."""

ROWS, COLUMNS = 64, 128
"""Largest tile of a low-rank update (chosen)."""

WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def gate_values(gate, up, alpha, limit, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return act(gate), the factor up, and the derivatives of both by gate and by up."""
    if KIND == 2:
        bounded = tl.minimum(gate, limit)
        share = sigmoid(bounded * alpha)
        value = bounded * share
        slope = tl.where(gate <= limit, share + alpha * value * (1.0 - share), 0.0)
        factor = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        steep = tl.where((up <= limit) & (up >= -limit), 1.0, 0.0)
    else:
        value, slope = activate(gate, KIND == 1)
        factor = up
        steep = 1.0 + 0.0 * up
    return value, slope, factor, steep


@triton.jit  # type: ignore[untyped-decorator]
def gate_experts_row(  # type: ignore[no-untyped-def]
    product, out, columns, alpha, limit, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Triton kernel: write a part of act(gate) * up (columns) for one row (2 * columns)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < columns
    begin = product + 2 * row * columns
    if KIND == 2:
        gate_at, up_at = begin + 2 * at, begin + 2 * at + 1
    else:
        gate_at, up_at = begin + at, begin + columns + at
    gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_at, mask=mask, other=0.0).to(tl.float32)
    value, _, factor, _ = gate_values(gate, up, alpha, limit, KIND)
    tl.store(out + row * columns + at, (value * factor).to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def gate_experts_row_backward(  # type: ignore[no-untyped-def]
    product, of_out, weights, of_weights, columns, alpha, limit, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Triton kernel: overwrite one row of gate and up with its gradient.

    Overwrite the row of `of_out` with the weighted output, and write the gradient of the row's weight.
    """
    row = tl.program_id(0).to(tl.int64)
    begin = product + 2 * row * columns
    weight = tl.load(weights + row).to(tl.float32)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < columns
        if KIND == 2:
            gate_at, up_at = begin + 2 * at, begin + 2 * at + 1
        else:
            gate_at, up_at = begin + at, begin + columns + at
        gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_at, mask=mask, other=0.0).to(tl.float32)
        out_at = of_out + row * columns + at
        output_slope = tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
        value, slope, factor, steep = gate_values(gate, up, alpha, limit, KIND)
        sums += output_slope * value * factor
        output_slope *= weight
        tl.store(gate_at, (output_slope * factor * slope).to(product.dtype.element_ty), mask=mask)
        tl.store(up_at, (output_slope * value * steep).to(product.dtype.element_ty), mask=mask)
        tl.store(out_at, (value * factor * weight).to(of_out.dtype.element_ty), mask=mask)
    tl.store(of_weights + row, tl.sum(sums, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def combine_row(  # type: ignore[no-untyped-def]
    rows, places, weights, out, columns, choices, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Triton kernel: write a part of the sum of one token's rows, times their weights."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < columns
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in range(choices):
        position = tl.load(places + token * choices + choice)
        value = tl.load(rows + position * columns + at, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * choices + choice).to(tl.float32)
        sums += value
    tl.store(out + token * columns + at, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def add_low_rank_tile(  # type: ignore[no-untyped-def]
    rows, columns, matrices, ends, count, width, rank, experts, RANK: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Triton kernel: add columns (count, rank) times the matrix (rank, width) of each row's expert to one
    tile of sorted rows (count, width).
    """
    begin = tl.program_id(0) * ROWS
    row = begin + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inner = tl.arange(0, RANK)
    left_mask = (row < count)[:, None] & (inner < rank)[None, :]
    left = tl.load(columns + row[:, None] * rank + inner[None, :], mask=left_mask, other=0.0)
    # An expert's number is the number of experts whose rows end before.
    number = tl.arange(0, EXPERTS)
    all_ends = tl.load(ends + number, mask=number < experts, other=2147483647)
    first = tl.sum((all_ends <= begin).to(tl.int32), axis=0)
    last = tl.sum((all_ends <= tl.minimum(begin + ROWS, count) - 1).to(tl.int32), axis=0)
    right_mask = (inner < rank)[:, None] & (column < width)[None, :]
    sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for expert in range(first, last + 1):
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends + expert)
        inside = (row >= start) & (row < end)
        at = (expert * rank + inner).to(tl.int64)[:, None] * width + column[None, :]
        right = tl.load(matrices + at, mask=right_mask, other=0.0)
        part = tl.where(inside[:, None], left, 0.0).to(left.dtype)
        sums = tl.dot(part, right, sums, input_precision="ieee")
    tile = rows + row.to(tl.int64)[:, None] * width + column[None, :]
    mask = (row < count)[:, None] & (column < width)[None, :]
    value = tl.load(tile, mask=mask, other=0.0).to(tl.float32) + sums
    tl.store(tile, value.to(rows.dtype.element_ty), mask=mask)


def add_low_rank_experts(
    rows: torch.Tensor, columns: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor
) -> None:
    """Launch the kernel that adds columns (S, r) times each expert's matrix (r, N) to sorted rows (S, N)."""
    count, width = rows.shape
    experts, rank, _ = matrices.shape
    # A product of Triton has at least 16 rows, columns and summands.
    block = min(COLUMNS, max(16, int(triton.next_power_of_2(width))))
    add_low_rank_tile[(triton.cdiv(count, ROWS), triton.cdiv(width, block))](
        rows, columns, matrices, ends, count, width, rank, experts,
        RANK=max(16, int(triton.next_power_of_2(rank))), EXPERTS=int(triton.next_power_of_2(experts)),
        ROWS=ROWS, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip


def gate_experts(product: torch.Tensor, kind: int, alpha: float, limit: float, *, out: torch.Tensor) -> None:
    """Launch the kernel that writes act(gate) * up (S, I) of a product (S, 2 * I)."""
    rows, columns = out.shape
    block = block_of(columns)
    gate_experts_row[(rows, triton.cdiv(columns, block))](
        product, out, columns, alpha, limit, KIND=kind, BLOCK=block, num_warps=WARPS
    )


def gate_experts_backward(
    product: torch.Tensor,
    of_out: torch.Tensor,
    weights: torch.Tensor,
    kind: int,
    alpha: float,
    limit: float,
    *,
    of_weights: torch.Tensor,
) -> None:
    """Launch the kernel that overwrites a product (S, 2 * I) with its gradient, and `of_out` with the
    weighted output.
    """
    rows, columns = of_out.shape
    gate_experts_row_backward[(rows,)](
        product, of_out, weights, of_weights, columns, alpha, limit, KIND=kind, BLOCK=block_of(columns),
        num_warps=WARPS,
    )  # fmt: skip


def combine_experts(
    rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None, *, out: torch.Tensor
) -> None:
    """Launch the kernel that writes the sums (T, H) of each token's rows (T * k, H)."""
    tokens, columns = out.shape
    block = block_of(columns)
    combine_row[(tokens, triton.cdiv(columns, block))](
        rows, places, rows if weights is None else weights, out, columns, len(places) // tokens,
        WEIGHTED=weights is not None, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip


def block_of(columns: int) -> int:
    """Return the number of elements that a kernel program handles at once: a whole row if it is short."""
    return min(BLOCK, int(triton.next_power_of_2(columns)))
