"""Cross-entropy in Triton: a program reads the logits of a token in blocks, twice. A second kernel multiplies
its gradients by that of the loss.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 8192
"""Largest number of logits that one kernel program loads at a time (chosen)."""

PRODUCT_BLOCK = 4096
"""Number of elements that one kernel program multiplies at a time (chosen)."""
PRODUCT_PROGRAMS = 2048
"""Largest number of kernel programs that the blocks are divided among (chosen). An idle program still costs
its launch.
"""


@triton.jit(do_not_specialize=("ignore_index",))  # type: ignore[untyped-decorator]
def write_row(  # type: ignore[no-untyped-def]
    logits, labels, share, losses, ignore_index, columns, stride, BLOCK: tl.constexpr
):  # fmt: skip
    """Triton kernel: write a token's loss, and overwrite its logits with their gradient.

    Each lane has its own largest logit and sum of exponentials until the end of the first pass.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    counts = label != ignore_index
    # An ignored label may be negative, and must not be used as an address.
    target = tl.load(logits + row * stride + tl.where(counts, label, 0)).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    # A large negative number replaces minus infinity, whose difference to itself is NaN.
    largest = tl.full((BLOCK,), -1.0e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + lane < columns
        value = tl.load(logits + row * stride + start + lane, mask=inside, other=-1.0e38).to(tl.float32)
        higher = tl.maximum(largest, value)
        # The sum is scaled to the new largest logit, so that no exponential overflows.
        total = total * tl.exp(largest - higher) + tl.where(inside, tl.exp(value - higher), 0.0)
        largest = higher
    top = tl.max(largest, 0)
    # Until here, each element of the block had its own largest logit.
    whole = tl.sum(total * tl.exp(largest - top), 0)
    tl.store(losses + row, tl.where(counts, top + tl.log(whole) - target, 0.0))
    factor = tl.where(counts, tl.load(share), 0.0).to(tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + lane
        inside = column < columns
        value = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        slope = tl.exp(value - top) / whole - tl.where(column == label, 1.0, 0.0)
        # An ignored token has no gradient.
        slope = tl.where(counts, slope * factor, 0.0)
        tl.store(logits + row * stride + column, slope.to(logits.dtype.element_ty), mask=inside)


def cross_entropy_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    share: torch.Tensor,
    ignore_index: int,
    *,
    losses: torch.Tensor,
) -> None:
    """Overwrite logits (T, V) with their gradient, and write the tokens' losses (T,), by one kernel."""
    rows, columns = logits.shape
    block = min(BLOCK, triton.next_power_of_2(columns))
    write_row[(rows,)](
        logits, labels, share, losses, ignore_index, columns, logits.stride(0), BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def multiply_blocks(values, factor, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Triton kernel: multiply blocks of `values` by a factor in place; do nothing if it is one."""
    by = tl.load(factor).to(tl.float32)
    # The factor is 1 unless the batch is split. Then nothing needs to be read.
    if by != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK
        while at < count:
            element = at + tl.arange(0, BLOCK)
            inside = element < count
            value = tl.load(values + element, mask=inside, other=0.0).to(tl.float32)
            tl.store(values + element, (value * by).to(values.dtype.element_ty), mask=inside)
            at += tl.num_programs(0).to(tl.int64) * BLOCK


def multiply(values: torch.Tensor, factor: torch.Tensor) -> None:
    """Launch the kernel that multiplies contiguous values in place by a scalar."""
    count = values.numel()
    programs = min(PRODUCT_PROGRAMS, -(-count // PRODUCT_BLOCK))
    multiply_blocks[(programs,)](values, factor, count, BLOCK=PRODUCT_BLOCK, num_warps=8)
