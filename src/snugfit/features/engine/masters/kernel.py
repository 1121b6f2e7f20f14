"""Triton kernels that update weights by AdamW and compute the gradient norm, for many weights at once or for
one.

A Triton program finds the weight of its block in `owners`, and the weight's memory addresses in `places`. The
scalars of a step, and the norm for clipping, are on the device too. All launches therefore have the same
arguments, and a CUDA graph can contain one.

An update of a weight in two halves reads 14 bytes per element and writes 12; of an fp32 weight, 16 and 12.
With 8-bit moments these are 8.06 and 6.06, or for an fp32 weight 10.06 and 6.06. With 24-bit weights they are
7.06 and 5.06 (`compact_kernel.py`). All arithmetic is in fp32. `HALVES` is the number of bits of a weight's
lower half: 16 or 8, or 0 for an fp32 weight. With fp32 moments it is 16.

**One weight.** The kernels for a single weight get the memory addresses as arguments of the launch. A
gradient that is freed at once has a new address each time. A table would have to be written for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from snugfit.features.engine.masters.block import NORM_WARPS, NUMBERS, SETTINGS, LaunchSettings
from snugfit.features.engine.masters.compact_kernel import update_compact
from snugfit.features.engine.masters.elements import (
    adamw,
    clip_coefficient,
    is_finite,
    join_halves,
    pointer,
    upper_half,
)

if TYPE_CHECKING:
    from snugfit.features.engine.masters.table import WeightTable

WIDE = 16
"""Bytes of 32-bit data that a thread reads at once, from addresses that are multiples of this."""


@triton.jit  # type: ignore[untyped-decorator]
def update_part(  # type: ignore[no-untyped-def]
    weight, residual, first_moment, second_moment, gradient, begin, left, scalars, coefficient,
    HALVES: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, CLIPS: tl.constexpr,
    ALIGNED: tl.constexpr, NARROW: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Update `BLOCK` elements by AdamW from `begin` at these memory addresses. With `MASKED`, update only the
    first `left` elements.
    """
    at = tl.arange(0, BLOCK)
    # Blocks that are full need no mask.
    mask = at < left if MASKED else None
    firsts = pointer(first_moment, tl.float32, ALIGNED) + begin + at
    seconds = pointer(second_moment, tl.float32, ALIGNED) + begin + at
    if HALVES:
        weights = pointer(weight, tl.int16, NARROW) + begin + at
        residuals = pointer(residual, tl.int16, NARROW) + begin + at
        gradients = pointer(gradient, tl.bfloat16, NARROW) + begin + at
        upper = tl.load(weights, mask=mask)
        lower = tl.load(residuals, mask=mask)
        exact = join_halves(upper, lower)
    else:
        weights = pointer(weight, tl.float32, ALIGNED) + begin + at
        gradients = pointer(gradient, tl.float32, ALIGNED) + begin + at
        exact = tl.load(weights, mask=mask)
    # bfloat16 gradients are converted to fp32 before any arithmetic.
    slope = tl.load(gradients, mask=mask).to(tl.float32)
    first = tl.load(firsts, mask=mask)
    second = tl.load(seconds, mask=mask)
    if CLIPS:
        slope = slope * coefficient
    exact, first, second = adamw(exact, slope, first, second, scalars, EXACT)

    tl.store(firsts, first, mask=mask)
    tl.store(seconds, second, mask=mask)
    if HALVES:
        upper, lower = upper_half(exact)
        tl.store(weights, upper, mask=mask)
        tl.store(residuals, lower, mask=mask)
    else:
        tl.store(weights, exact, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def update_any(  # type: ignore[no-untyped-def]
    weight, residual, first, second, gradient, first_scales, second_scales, begin, left, scalars, coefficient,
    HALVES: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr,
    CLIPS: tl.constexpr, ALIGNED: tl.constexpr, NARROW: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Update elements by AdamW: run `update_compact` for 8-bit moments in groups, else `update_part`."""
    if GROUP:
        update_compact(
            weight, residual, first, second, gradient, first_scales, second_scales, begin, left, scalars,
            coefficient, HALVES, BLOCK, GROUP, MASKED, CLIPS, ALIGNED, NARROW, EXACT,
        )  # fmt: skip
    else:
        update_part(
            weight, residual, first, second, gradient, begin, left, scalars, coefficient,
            HALVES, BLOCK, MASKED, CLIPS, ALIGNED, NARROW, EXACT,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def update_up_to(  # type: ignore[no-untyped-def]
    weight, residual, first, second, gradient, first_scales, second_scales, begin, left, scalars, coefficient,
    HALVES: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, CLIPS: tl.constexpr,
    ALIGNED: tl.constexpr, NARROW: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Update a whole block of elements by AdamW, or with a mask only its first `left` elements."""
    if left >= BLOCK:
        update_any(
            weight, residual, first, second, gradient, first_scales, second_scales, begin, left, scalars,
            coefficient, HALVES, BLOCK, GROUP, False, CLIPS, ALIGNED, NARROW, EXACT,
        )  # fmt: skip
    else:
        update_any(
            weight, residual, first, second, gradient, first_scales, second_scales, begin, left, scalars,
            coefficient, HALVES, BLOCK, GROUP, True, CLIPS, ALIGNED, NARROW, EXACT,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def update_weights(  # type: ignore[no-untyped-def]
    places, owners, weight_indices, numbers, norm, max_norm,
    HALVES: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, CLIPS: tl.constexpr,
    RECORD: tl.constexpr, ROW: tl.constexpr, ALIGNED: tl.constexpr, NARROW: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Triton kernel: update one block of elements by AdamW, unless the gradient norm is not finite."""
    # A launch takes few pointers, so the kernel reads all other addresses from tables on the device.
    coefficient, goes_on = 1.0, True
    if CLIPS:
        length = tl.load(norm)
        coefficient = clip_coefficient(length, max_norm)
        # With a norm that is NaN or infinite, no weight may change.
        goes_on = is_finite(length)
    if goes_on:
        block = tl.program_id(0)
        column = tl.load(owners + block)
        record = places + column * RECORD
        gradient = tl.load(record + 6)
        # The address is 0 for a weight without a gradient.
        if gradient != 0:
            begin = (block - tl.load(record)) * BLOCK
            left = tl.load(record + 1) - begin
            scalars = numbers + tl.load(weight_indices + column) * ROW
            weight, residual = tl.load(record + 2), tl.load(record + 3)
            first, second = tl.load(record + 4), tl.load(record + 5)
            first_scales, second_scales = first, second
            if GROUP:
                first_scales, second_scales = tl.load(record + 7), tl.load(record + 8)
            update_up_to(
                weight, residual, first, second, gradient, first_scales, second_scales, begin, left, scalars,
                coefficient, HALVES, BLOCK, GROUP, CLIPS, ALIGNED, NARROW, EXACT,
            )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def sum_squares(  # type: ignore[no-untyped-def]
    places, owners, sums, blocks, HALVES: tl.constexpr, BLOCK: tl.constexpr, RECORD: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Triton kernel: sum the squares of the gradients in the blocks of one Triton program, in fp32."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    # The number of programs is fixed, so that sums are added in the same order on all devices.
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        record = places + tl.load(owners + block) * RECORD
        address = tl.load(record + 6)
        begin = (block - tl.load(record)) * BLOCK
        left = tl.where(address != 0, tl.load(record + 1) - begin, 0)
        if HALVES:
            gradients = pointer(address, tl.bfloat16, ALIGNED) + begin + at
        else:
            gradients = pointer(address, tl.float32, ALIGNED) + begin + at
        slope = tl.load(gradients, mask=at < left, other=0.0).to(tl.float32)
        total += slope * slope
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@triton.jit  # type: ignore[untyped-decorator]
def root_of_sums(sums, norm, count, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Triton kernel: write the square root of the total of `sums`: the gradient norm, a scalar."""
    at = tl.arange(0, WIDTH)
    total = tl.sum(tl.load(sums + at, mask=at < count, other=0.0), 0)
    # The root is rounded to the nearest, like torch's.
    tl.store(norm, tl.sqrt_rn(total))


def launch_update(
    table: WeightTable,
    numbers: torch.Tensor,
    norm: torch.Tensor | None,
    max_norm: float,
) -> None:
    """Launch AdamW's update of all weights in this table, with the scalars of the step in rows (N, 8). With a
    norm, a scalar in fp32, gradients are clipped to the norm `max_norm`.
    """
    settings, aligned = table.settings, table.is_aligned
    update_weights[(table.blocks,)](
        # Pointers that the kernel does not use must still be valid arguments.
        table.places, table.owners, table.weight_indices, numbers, numbers if norm is None else norm,
        float(max_norm),
        HALVES=table.lower_bits, BLOCK=settings.block, GROUP=table.group, CLIPS=norm is not None,
        # If some addresses are not aligned, each thread reads single elements.
        RECORD=table.places.size(1), ROW=NUMBERS, ALIGNED=WIDE if aligned else 1,
        NARROW=settings.narrow if aligned else 1, EXACT=settings.exact,
        num_warps=settings.warps,
    )  # fmt: skip


def launch_sums(table: WeightTable, sums: torch.Tensor) -> None:
    """Launch the kernel that writes sums of squares of this table's gradients, in fp32: one sum for each
    Triton program.
    """
    sum_squares[(sums.numel(),)](
        table.places, table.owners, sums, table.blocks, HALVES=table.lower_bits > 0,
        BLOCK=table.settings.block, RECORD=table.places.size(1), ALIGNED=WIDE if table.is_aligned else 1,
        num_warps=NORM_WARPS,
    )  # fmt: skip


def launch_norm(sums: torch.Tensor, norm: torch.Tensor) -> None:
    """Launch the kernel that writes the gradients' norm, a scalar, from sums of squares."""
    root_of_sums[(1,)](sums, norm, sums.numel(), WIDTH=triton.next_power_of_2(sums.numel()), num_warps=8)


# ---- one weight -------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def update_one(  # type: ignore[no-untyped-def]
    weight, residual, first, second, gradient, first_scales, second_scales, scalars, norm, max_norm, count,
    HALVES: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, CLIPS: tl.constexpr,
    ALIGNED: tl.constexpr, NARROW: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Triton kernel: update a block of one weight by AdamW, unless the gradient norm is not finite."""
    coefficient, goes_on = 1.0, True
    if CLIPS:
        length = tl.load(norm)
        coefficient = clip_coefficient(length, max_norm)
        goes_on = is_finite(length)
    if goes_on:
        # The offset of an element in a large weight may exceed 32 bits.
        begin = tl.program_id(0).to(tl.int64) * BLOCK
        left = count - begin
        update_up_to(
            weight, residual, first, second, gradient, first_scales, second_scales, begin, left, scalars,
            coefficient, HALVES, BLOCK, GROUP, CLIPS, ALIGNED, NARROW, EXACT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def add_squares(  # type: ignore[no-untyped-def]
    gradient, sums, count, HALVES: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr
):
    """Triton kernel: add the squares of a gradient's blocks to the sum of its Triton program, in fp32."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    while begin < count:
        if HALVES:
            slopes = pointer(gradient, tl.bfloat16, ALIGNED) + begin + at
        else:
            slopes = pointer(gradient, tl.float32, ALIGNED) + begin + at
        slope = tl.load(slopes, mask=at < count - begin, other=0.0).to(tl.float32)
        total += slope * slope
        begin += tl.num_programs(0).to(tl.int64) * BLOCK
    scalars = sums + tl.program_id(0)
    # Each program of a launch has its own sum, so no atomic addition is needed.
    tl.store(scalars, tl.load(scalars) + tl.sum(total, 0))


def launch_update_of_one(
    addresses: list[int],
    count: int,
    scalars: torch.Tensor,
    norm: torch.Tensor | None,
    max_norm: float,
    *,
    halves: int,
    group: int,
    settings: LaunchSettings,
) -> None:
    """Launch AdamW's update of one weight at these addresses, with its row of scalars (8,).

    The addresses are those of the weight, its residual or 0, both moments, its gradient, and with a group
    both scales. With a norm, a scalar in fp32, the gradient is clipped to the norm `max_norm`. `halves` is
    the bits of a residual, 0 without one.
    """
    # All reads share the alignment constant, so one unaligned address makes all of them narrow.
    aligned = not any(address % WIDE for address in addresses)
    update_one[(-(-count // settings.block),)](
        # Without groups the kernel never reads the scales, so any valid addresses are passed.
        *addresses[:5], *(addresses[5:] or addresses[2:4]), scalars,
        scalars if norm is None else norm, float(max_norm), count,
        HALVES=halves, BLOCK=settings.block, GROUP=group, CLIPS=norm is not None,
        ALIGNED=WIDE if aligned else 1, NARROW=settings.narrow if aligned else 1,
        EXACT=settings.exact, num_warps=settings.warps,
    )  # fmt: skip


def launch_squares_of_one(gradient: torch.Tensor, sums: torch.Tensor) -> None:
    """Launch the kernel that adds the squares of a gradient to sums (programs,) in fp32. The Triton programs
    take its blocks in turn.
    """
    address, count, block = gradient.data_ptr(), gradient.numel(), SETTINGS.block
    add_squares[(min(sums.numel(), -(-count // block)),)](
        address, sums, count, HALVES=gradient.dtype is torch.bfloat16, BLOCK=block,
        ALIGNED=1 if address % WIDE else WIDE, num_warps=NORM_WARPS,
    )  # fmt: skip
