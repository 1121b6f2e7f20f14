"""The gated activation of gate and up with low-rank updates in Triton.

A program adds the updates to its tile of gate and up in registers. So they are never added in memory, which
would read and write the whole product of gate and up. A tile's updates are products of a few columns each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from snugfit.features.kernels.operations.programs.gated import activate

TILE = (64, 128)
"""Numbers of rows and columns in one kernel program (chosen)."""

WARPS = 8

MOST_INNER = 64
"""Largest number of columns of factors that are multiplied at a time (chosen)."""


@triton.jit  # type: ignore[untyped-decorator]
def add_update(  # type: ignore[no-untyped-def]
    values, left, right, row, column, rows, columns, left_row, right_row, right_inner,
    INNER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return values (ROWS, COLUMNS) plus the tile left @ right.T of `INNER` products each, in a Triton
    program.
    """
    for first in range(0, INNER, BLOCK):
        inner = first + tl.arange(0, BLOCK)
        mask = (row[:, None] < rows) & (inner[None, :] < INNER)
        one = tl.load(left + row[:, None] * left_row + inner[None, :], mask=mask, other=0.0)
        mask = (inner[:, None] < INNER) & (column[None, :] < columns)
        at = column[None, :].to(tl.int64) * right_row + inner[:, None] * right_inner
        other = tl.load(right + at, mask=mask, other=0.0)
        values = tl.dot(one, other, acc=values, input_precision="ieee")
    return values


@triton.jit  # type: ignore[untyped-decorator]
def gate_tile(  # type: ignore[no-untyped-def]
    product, out, gate_left, gate_right, up_left, up_right, rows, columns,
    gate_left_row, gate_right_row, gate_right_inner, up_left_row, up_right_row, up_right_inner,
    GATE: tl.constexpr, UP: tl.constexpr, GATE_BLOCK: tl.constexpr, UP_BLOCK: tl.constexpr,
    TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Triton kernel: write act(gate) * up for a tile of rows (2 * columns) of gate and up plus updates."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row[:, None] < rows) & (column[None, :] < columns)
    at = 2 * row[:, None] * columns + column[None, :]
    gate = tl.load(product + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(product + at + columns, mask=mask, other=0.0).to(tl.float32)
    gate = add_update(
        gate, gate_left, gate_right, row, column, rows, columns, gate_left_row, gate_right_row,
        gate_right_inner, GATE, GATE_BLOCK,
    )  # fmt: skip
    up = add_update(
        up, up_left, up_right, row, column, rows, columns, up_left_row, up_right_row, up_right_inner, UP,
        UP_BLOCK,
    )  # fmt: skip
    value, _ = activate(gate, TANH)
    # The activation is rounded first, as by torch's two operators.
    value = value.to(out.dtype.element_ty).to(tl.float32) * up
    tl.store(out + row[:, None] * columns + column[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def gate_tile_backward(  # type: ignore[no-untyped-def]
    product, output_grad, gate_left, gate_right, up_left, up_right, rest_left, rest_right, rows, columns,
    gate_left_row, gate_right_row, gate_right_inner, up_left_row, up_right_row, up_right_inner,
    rest_left_row, rest_right_row, rest_right_inner,
    GATE: tl.constexpr, UP: tl.constexpr, REST: tl.constexpr, GATE_BLOCK: tl.constexpr,
    UP_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, TANH: tl.constexpr, AGAIN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Triton kernel: overwrite a tile of gate and up with its gradient.

    With `AGAIN`, the forward pass's output overwrites its own gradient.
    """
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row[:, None] < rows) & (column[None, :] < columns)
    at = 2 * row[:, None] * columns + column[None, :]
    into = row[:, None] * columns + column[None, :]
    gate = tl.load(product + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(product + at + columns, mask=mask, other=0.0).to(tl.float32)
    output_slope = tl.load(output_grad + into, mask=mask, other=0.0).to(tl.float32)
    gate = add_update(
        gate, gate_left, gate_right, row, column, rows, columns, gate_left_row, gate_right_row,
        gate_right_inner, GATE, GATE_BLOCK,
    )  # fmt: skip
    up = add_update(
        up, up_left, up_right, row, column, rows, columns, up_left_row, up_right_row, up_right_inner, UP,
        UP_BLOCK,
    )  # fmt: skip
    output_slope = add_update(
        output_slope, rest_left, rest_right, row, column, rows, columns, rest_left_row, rest_right_row,
        rest_right_inner, REST, REST_BLOCK,
    )  # fmt: skip
    value, slope = activate(gate, TANH)
    tl.store(product + at, (output_slope * up * slope).to(product.dtype.element_ty), mask=mask)
    tl.store(product + at + columns, (output_slope * value).to(product.dtype.element_ty), mask=mask)
    if AGAIN:
        value = value.to(product.dtype.element_ty).to(tl.float32) * up
        tl.store(output_grad + into, value.to(output_grad.dtype.element_ty), mask=mask)


def gate_adapted(
    product: torch.Tensor, factors: Sequence[torch.Tensor | None], tanh: bool, *, out: torch.Tensor
) -> None:
    """Launch the kernel that writes act(gate) * up (T, I) of a product (T, 2 * I) plus the updates.

    `factors` are (T, k) and (I, k) for gate, and for up; both None without an update.
    """
    matrices, strides, inner, blocks = _arguments(product, factors)
    gate_tile[_grid(out)](
        product, out, *matrices, *out.shape, *strides, *inner, *blocks, TANH=tanh, ROWS=TILE[0],
        COLUMNS=TILE[1], num_warps=WARPS,
    )  # fmt: skip


def gate_adapted_backward(
    product: torch.Tensor,
    output_grad: torch.Tensor,
    factors: Sequence[torch.Tensor | None],
    tanh: bool,
    again: bool,
) -> None:
    """Launch the kernel that overwrites a product (T, 2 * I) of gate and up with its gradient.

    The third pair of `factors` is that of the rest of `output_grad` (T, I).
    """
    matrices, strides, inner, blocks = _arguments(product, factors)
    gate_tile_backward[_grid(output_grad)](
        product, output_grad, *matrices, *output_grad.shape, *strides, *inner, *blocks, TANH=tanh,
        AGAIN=again, ROWS=TILE[0], COLUMNS=TILE[1], num_warps=WARPS,
    )  # fmt: skip


def _grid(tile_of: torch.Tensor) -> tuple[int, int]:
    """Return the number of programs. Those of one tile of rows follow each other, and share its factors."""
    rows, columns = tile_of.shape
    return triton.cdiv(columns, TILE[1]), triton.cdiv(rows, TILE[0])


def _arguments(product: torch.Tensor, factors: Sequence[torch.Tensor | None]) -> tuple[list[Any], ...]:
    """Return the matrices of all factors, their strides, their inner sizes, and the sizes of blocks of these.

    An inner size of 0 means that there is no update.
    """
    matrices: list[Any] = []
    strides: list[int] = []
    inner: list[int] = []
    for left, right in zip(factors[::2], factors[1::2], strict=True):
        if left is None or right is None:
            # The kernel reads nothing of them, so any pointer is valid.
            matrices, strides, inner = [*matrices, product, product], [*strides, 0, 0, 0], [*inner, 0]
        else:
            matrices += [left, right]
            strides += [left.stride(0), *right.stride()]
            inner.append(left.size(1))
    return matrices, strides, inner, [inner_block(size) for size in inner]


def inner_block(inner: int) -> int:
    """Return the number of columns of factors with `inner` columns that are multiplied at a time."""
    # A tensor core multiplies at least 16 columns.
    return min(MOST_INNER, max(16, int(triton.next_power_of_2(inner))))
