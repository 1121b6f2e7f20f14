"""Triton functions on single elements: clipping, joining and splitting of halves, AdamW's arithmetic."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def clip_coefficient(norm, max_norm):  # type: ignore[no-untyped-def]
    """Return the factor by which gradients of this norm are clipped
    (`torch.nn.utils.clip_grads_with_norm_`)."""
    # The small addend and the limit of 1 are those of torch.
    return tl.minimum(tl.div_rn(max_norm, norm + 1e-6), 1.0)


@triton.jit
def is_finite(number):  # type: ignore[no-untyped-def]
    """Return True if a number is neither infinite nor NaN, in a Triton kernel."""
    # A number is infinite or NaN if all exponent bits are ones; the sign bit is masked out.
    return (number.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000


@triton.jit
def join_halves(upper, lower):  # type: ignore[no-untyped-def]
    """Return the fp32 number that is joined from a bfloat16 half and a signed 16-bit difference."""
    # The lower half is a signed number, so it is added.
    return ((upper.to(tl.int32) << 16) + lower.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def upper_half(exact):  # type: ignore[no-untyped-def]
    """Return the nearest bfloat16 of an fp32 number, and the remaining difference in 16 bits."""
    bits = exact.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)  # NaN
    # A number halfway between two bfloat16 values is rounded away from zero. Rounding to even would not be
    # invertible with 16 bits.
    upper = (bits + 0x8000) >> 16
    return upper.to(tl.int16), (bits - (upper << 16)).to(tl.int16)


@triton.jit
def split_by_chance(exact, draws):  # type: ignore[no-untyped-def]
    """Return the bfloat16 half of an fp32 number and 8 further bits (`halves.split_by_chance`). The number is
    rounded stochastically to 24 bits, by random integers `draws` from 0 to 255.
    """
    bits = exact.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)  # NaN
    # Rounding comes before the split, so that a carry reaches the bfloat16 half.
    bits = ((bits + draws) >> 8) << 8
    upper = (bits + 0x8000) >> 16
    return upper.to(tl.int16), ((bits - (upper << 16)) >> 8).to(tl.int8)


@triton.jit  # type: ignore[untyped-decorator]
def pointer(address, element, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return an address as a Triton pointer to elements of this type."""
    return tl.multiple_of(address.to(tl.pointer_type(element)), ALIGNED)


@triton.jit  # type: ignore[untyped-decorator]
def adamw(exact, slope, first, second, scalars, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return weights and moments after an AdamW step in fp32, in the order of operations of `adamw.update`.
    `scalars` is the step's row of scalars.
    """
    keep, first_share, second_keep = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
    second_share, root = tl.load(scalars + 3), tl.load(scalars + 4)
    eps, rate = tl.load(scalars + 5), tl.load(scalars + 6)
    exact = exact * keep
    way = slope - first
    # torch's `lerp` has two formulas, chosen by a weight below or above one half.
    first = tl.where(first_share < 0.5, first + first_share * way, slope - way * (1.0 - first_share))
    second = second * second_keep + second_share * slope * slope
    if EXACT:
        exact = exact + tl.div_rn(rate * first, tl.div_rn(tl.sqrt_rn(second), root) + eps)
    else:
        # One division fewer than in the exact formula. Results may be off by a unit in the last place.
        exact = exact + (rate * first) / (tl.sqrt(second) * (1.0 / root) + eps)
    return exact, first, second
