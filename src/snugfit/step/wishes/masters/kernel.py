"""One kernel that updates many weights and the halves of their masters, in Triton.

A program finds the weight that its block belongs to in the table of `places_of`, reads 14 bytes an element,
computes in fp32 in the order of `adamw.update`, and writes 12. The table has addresses, since a launch takes
a few pointers and a model has hundreds of weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from snugfit.step.wishes.masters.block import BLOCK, WARPS

ALIGNED = 16
"""Bytes that a thread reads or writes at once, at addresses that are multiples of it."""


@triton.jit  # type: ignore[untyped-decorator]
def update_block(  # type: ignore[no-untyped-def]
    weights, residuals, firsts, seconds, gradients, at, count,
    keep, first_share, second_keep, second_share, root, eps, rate, MASKED: tl.constexpr,
):  # fmt: skip
    """Updates the elements `at`; with `MASKED`, those of them that a weight of `count` elements has."""
    mask = at < count if MASKED else None
    upper = tl.load(weights + at, mask=mask).to(tl.int32)
    lower = tl.load(residuals + at, mask=mask).to(tl.int32)
    exact = ((upper << 16) + lower).to(tl.float32, bitcast=True)
    slope = tl.load(gradients + at, mask=mask).to(tl.float32)
    first = tl.load(firsts + at, mask=mask)
    second = tl.load(seconds + at, mask=mask)

    exact = exact * keep
    way = slope - first
    first = tl.where(first_share < 0.5, first + first_share * way, slope - way * (1.0 - first_share))
    second = second * second_keep + second_share * slope * slope
    spread = tl.div_rn(tl.sqrt_rn(second), root) + eps
    exact = exact + tl.div_rn(rate * first, spread)

    bits = exact.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)  # what is not a number
    upper = (bits + 0x8000) >> 16
    tl.store(weights + at, upper.to(tl.int16), mask=mask)
    tl.store(residuals + at, (bits - (upper << 16)).to(tl.int16), mask=mask)
    tl.store(firsts + at, first, mask=mask)
    tl.store(seconds + at, second, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def update_weights(  # type: ignore[no-untyped-def]
    places, keep, first_share, second_keep, second_share, root, eps, rate,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Updates one block of one of the weights whose `places` these are (7, COLUMNS)."""
    program = tl.program_id(0).to(tl.int64)
    starts = tl.load(places + tl.arange(0, COLUMNS))
    column = tl.sum((starts <= program).to(tl.int32), 0) - 1
    own = places + column
    begin = (program - tl.load(own)) * BLOCK
    count = tl.load(own + COLUMNS)
    weights = tl.load(own + 2 * COLUMNS).to(tl.pointer_type(tl.int16))
    residuals = tl.load(own + 3 * COLUMNS).to(tl.pointer_type(tl.int16))
    firsts = tl.load(own + 4 * COLUMNS).to(tl.pointer_type(tl.float32))
    seconds = tl.load(own + 5 * COLUMNS).to(tl.pointer_type(tl.float32))
    gradients = tl.load(own + 6 * COLUMNS).to(tl.pointer_type(tl.bfloat16))
    weights, residuals = tl.multiple_of(weights, ALIGNED), tl.multiple_of(residuals, ALIGNED)
    firsts, seconds = tl.multiple_of(firsts, ALIGNED), tl.multiple_of(seconds, ALIGNED)
    gradients = tl.multiple_of(gradients, ALIGNED)
    at = begin + tl.arange(0, BLOCK)
    if begin + BLOCK <= count:
        update_block(
            weights, residuals, firsts, seconds, gradients, at, count,
            keep, first_share, second_keep, second_share, root, eps, rate, False,
        )  # fmt: skip
    else:
        update_block(
            weights, residuals, firsts, seconds, gradients, at, count,
            keep, first_share, second_keep, second_share, root, eps, rate, True,
        )  # fmt: skip


def launch(lists: Sequence[Sequence[torch.Tensor]], places: torch.Tensor, numbers: Sequence[float]) -> None:
    """Runs the kernel over these weights, residuals, both moments and gradients, whose table `places` is,
    with the numbers of `adamw.Numbers`."""
    blocks = sum(triton.cdiv(weight.numel(), BLOCK) for weight in lists[0])
    aligned = all(tensor.data_ptr() % ALIGNED == 0 for tensors in lists for tensor in tensors)
    update_weights[(blocks,)](
        places, *numbers, COLUMNS=places.size(1), BLOCK=BLOCK, ALIGNED=ALIGNED if aligned else 1,
        num_warps=WARPS,
    )  # fmt: skip
