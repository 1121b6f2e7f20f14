"""Kernels for one weight at a time: its update, and its gradient's share of a sum of squares. In Triton.

The addresses are arguments of the launch. A gradient has an address only once it exists, so a table on the
device would have to be written for each. Elements are updated as in `kernel.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from snugfit.features.engine.masters.block import NORM_WARPS, SETTINGS, LaunchSettings
from snugfit.features.engine.masters.elements import clip_coefficient, is_finite, pointer
from snugfit.features.engine.masters.kernel import WIDE, update_any


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def update_one(  # type: ignore[no-untyped-def]
    weight, residual, first, second, gradient, first_scales, second_scales, own, norm, most, count,
    HALVES: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, CLIPS: tl.constexpr,
    ALIGNED: tl.constexpr, NARROW: tl.constexpr, EVICT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Update a program's block of a weight with `count` elements, unless the norm is not finite."""
    coefficient, goes_on = 1.0, True
    if CLIPS:
        length = tl.load(norm)
        coefficient = clip_coefficient(length, most)
        goes_on = is_finite(length)
    if goes_on:
        # Offsets of large weights exceed 32 bits.
        begin = tl.program_id(0).to(tl.int64) * BLOCK
        left = count - begin
        if left >= BLOCK:
            update_any(
                weight, residual, first, second, gradient, first_scales, second_scales, begin, left, own,
                coefficient, HALVES, BLOCK, GROUP, False, CLIPS, ALIGNED, NARROW, EVICT, EXACT,
            )  # fmt: skip
        else:
            update_any(
                weight, residual, first, second, gradient, first_scales, second_scales, begin, left, own,
                coefficient, HALVES, BLOCK, GROUP, True, CLIPS, ALIGNED, NARROW, EVICT, EXACT,
            )  # fmt: skip


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def add_squares(  # type: ignore[no-untyped-def]
    gradient, sums, count, HALVES: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr
):
    """Add the squares of a program's blocks of a gradient to the program's sum, in fp32."""
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
    own = sums + tl.program_id(0)
    # Programs of one launch have sums of their own, so no atomic addition is needed.
    tl.store(own, tl.load(own) + tl.sum(total, 0))


def launch_update_of_one(
    addresses: list[int],
    count: int,
    own: torch.Tensor,
    norm: torch.Tensor | None,
    most: float,
    *,
    halves: int,
    group: int,
    settings: LaunchSettings,
) -> None:
    """Update the weight at these addresses by its row of numbers (8,).

    The addresses are those of the weight, its residual or 0, both moments, its gradient, and with a group
    both scales. With a norm, a scalar in fp32, the gradient is clipped to the norm `most`. `halves` is the
    bits of a residual, 0 without one.
    """
    # One unaligned address makes all reads narrow, since they share the constants.
    aligned = not any(address % WIDE for address in addresses)
    update_one[(-(-count // settings.block),)](
        # Without a group the scales are never read; any addresses will do.
        *addresses[:5], *(addresses[5:] or addresses[2:4]), own,
        own if norm is None else norm, float(most), count,
        HALVES=halves, BLOCK=settings.block, GROUP=group, CLIPS=norm is not None,
        ALIGNED=WIDE if aligned else 1, NARROW=settings.narrow if aligned else 1, EVICT=settings.evict,
        EXACT=settings.exact, num_warps=settings.warps,
    )  # fmt: skip


def launch_squares_of_one(gradient: torch.Tensor, sums: torch.Tensor) -> None:
    """Add a gradient's squares to sums (programs,) in fp32, those of its blocks in turn to each."""
    address, count, block = gradient.data_ptr(), gradient.numel(), SETTINGS.block
    add_squares[(min(sums.numel(), -(-count // block)),)](
        address, sums, count, HALVES=gradient.dtype is torch.bfloat16, BLOCK=block,
        ALIGNED=1 if address % WIDE else WIDE, num_warps=NORM_WARPS,
    )  # fmt: skip
