"""The gated activation in Triton: act(gate) * up, and its gradients, over halves of rows of one product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048
"""Largest number of elements of a row in one kernel program."""

WARPS = 8


@triton.jit
def sigmoid(value):  # type: ignore[no-untyped-def]
    """Return 1 / (1 + exp(-value)), without overflow at either end."""
    return 1.0 / (1.0 + tl.exp(-value))


@triton.jit  # type: ignore[untyped-decorator]
def activate(gate, TANH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return SiLU, or with `TANH` GELU's approximation by tanh, and its derivative at the gate."""
    if TANH:
        # 0.5 * (1 + tanh(x)) is sigmoid(2 * x)
        inner = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
        share = sigmoid(inner)
        steep = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
    else:
        share = sigmoid(gate)
        steep = 1.0
    value = gate * share
    # The derivative of gate * sigmoid(inner); `steep` is the derivative of `inner`.
    slope = share + value * (1.0 - share) * steep
    return value, slope


@triton.jit  # type: ignore[untyped-decorator]
def gate_row(product, out, columns, TANH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Triton kernel: write act(gate) * up (columns) for one row (2 * columns) of gate and up."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < columns
    begin = 2 * row * columns
    read = tl.load(product + begin + at, mask=mask, other=0.0)
    up = tl.load(product + begin + columns + at, mask=mask, other=0.0).to(tl.float32)
    value, _ = activate(read.to(tl.float32), TANH)
    # The activation is rounded first, as by torch's two operators.
    value = value.to(read.dtype).to(tl.float32) * up
    tl.store(out + row * columns + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def gate_row_backward(  # type: ignore[no-untyped-def]
    product, output_grad, columns, TANH: tl.constexpr, AGAIN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Triton kernel: overwrite one row of gate and up with its gradient.

    With `AGAIN`, the forward pass's output overwrites its own gradient.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < columns
    begin = 2 * row * columns
    read = tl.load(product + begin + at, mask=mask, other=0.0)
    up = tl.load(product + begin + columns + at, mask=mask, other=0.0).to(tl.float32)
    output_slope = tl.load(output_grad + row * columns + at, mask=mask, other=0.0).to(tl.float32)
    value, slope = activate(read.to(tl.float32), TANH)
    tl.store(product + begin + at, (output_slope * up * slope).to(product.dtype.element_ty), mask=mask)
    tl.store(product + begin + columns + at, (output_slope * value).to(product.dtype.element_ty), mask=mask)
    if AGAIN:
        value = value.to(read.dtype).to(tl.float32) * up
        tl.store(output_grad + row * columns + at, value.to(output_grad.dtype.element_ty), mask=mask)


def gate(product: torch.Tensor, tanh: bool, *, out: torch.Tensor) -> None:
    """Launch the kernel that writes act(gate) * up (T, I) of a product (T, 2 * I)."""
    rows, columns = out.shape
    gate_row[(rows, triton.cdiv(columns, BLOCK))](
        product, out, columns, TANH=tanh, BLOCK=block_of(columns), num_warps=WARPS
    )


def gate_backward(product: torch.Tensor, output_grad: torch.Tensor, tanh: bool, again: bool) -> None:
    """Launch the kernel that overwrites a product (T, 2 * I) of gate and up with its gradient."""
    rows, columns = output_grad.shape
    gate_row_backward[(rows, triton.cdiv(columns, BLOCK))](
        product, output_grad, columns, TANH=tanh, AGAIN=again, BLOCK=block_of(columns), num_warps=WARPS
    )


def block_of(columns: int) -> int:
    """Return the number of elements in one kernel program: a whole row if it is short."""
    return min(BLOCK, int(triton.next_power_of_2(columns)))
