"""Triton code that updates a block of weights with 8-bit moments. `compact.py` is its reference in plain
torch.

An update with 8-bit moments moves half the bytes of one with fp32 moments, so arithmetic limits its speed.
`HALVES` is the number of bits of a weight's lower half: 16, 8, or 0 for an fp32 weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from snugfit.features.engine.masters.compact import (
    DRAW_BITS,
    FIRST_TOP,
    MIXES,
    SECOND_TOP,
    SMALLEST,
    STRIDE,
)
from snugfit.features.engine.masters.elements import adamw, join_halves, pointer, split_by_chance, upper_half

FIRST = tl.constexpr(FIRST_TOP)
FIRST_SQUARE = tl.constexpr(float(FIRST_TOP**2))
FIRST_SHARE = tl.constexpr(1.0 / FIRST_TOP**2)
SECOND = tl.constexpr(SECOND_TOP)
SECOND_FOURTH = tl.constexpr(float(SECOND_TOP**4))
SECOND_SHARE = tl.constexpr(1.0 / SECOND_TOP**4)
LEAST_SCALE = tl.constexpr(SMALLEST)
STEP_STRIDE = tl.constexpr(STRIDE)
LAST_BITS = tl.constexpr(32 - DRAW_BITS)
FIRST_MIX, SECOND_MIX = tl.constexpr(MIXES[0]), tl.constexpr(MIXES[1])


@triton.jit
def hash_of(at, step):  # type: ignore[no-untyped-def]
    """Return a 32-bit random hash for each element of a weight in this optimizer step (as in
    `compact.chances`).
    """
    bits = at.to(tl.uint32) + step.to(tl.uint32) * STEP_STRIDE
    bits ^= bits >> 16
    bits *= FIRST_MIX
    bits ^= bits >> 15
    bits *= SECOND_MIX
    bits ^= bits >> 16
    return bits


@triton.jit
def reciprocal(largest):  # type: ignore[no-untyped-def]
    """Return the reciprocal of a group's scale; 0 for a scale of 0."""
    # Both branches of `where` are computed, so the inner selection avoids a division by zero.
    return tl.where(largest > LEAST_SCALE, tl.div_rn(1.0, tl.where(largest > LEAST_SCALE, largest, 1.0)), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def root_of(number, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the square root, rounded to the nearest if `EXACT`, else as the hardware approximates it."""
    # A root that is off by one unit may give a neighbouring code, but rounding is random anyway.
    return tl.sqrt_rn(number) if EXACT else tl.sqrt(number)


@triton.jit  # type: ignore[untyped-decorator]
def first_codes(first, largest, chance, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return 8-bit codes of fp32 first moments (`compact.narrow_first`)."""
    shares = tl.abs(first) * reciprocal(largest)[:, None] * FIRST_SQUARE
    below = tl.floor(root_of(shares, EXACT))
    above = chance * (2.0 * below + 1.0) < shares - below * below
    whole = tl.minimum(below + above.to(tl.float32), FIRST)
    return tl.where(first < 0, -whole, whole)


@triton.jit  # type: ignore[untyped-decorator]
def second_codes(second, largest, chance, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return 8-bit codes of fp32 second moments (`compact.narrow_second`)."""
    shares = second * reciprocal(largest)[:, None] * SECOND_FOURTH
    below = tl.floor(root_of(root_of(shares, EXACT), EXACT))
    low, high = below * below, (below + 1.0) * (below + 1.0)
    low, high = low * low, high * high
    # The probability of rounding up is linear in the value, as in `compact.narrow_second`.
    above = chance * (high - low) < shares - low
    whole = tl.minimum(below + above.to(tl.float32), SECOND)
    return tl.where(second > 0, tl.maximum(whole, 1.0), whole)


@triton.jit  # type: ignore[untyped-decorator]
def pointer_to_lower(residual, HALVES: tl.constexpr, NARROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the address of the weights' low halves as a Triton pointer to their dtype."""
    if HALVES == 8:
        # A thread reads half as many bytes of 8-bit data as of 16-bit data, so that it gets the same
        # elements.
        lower = pointer(residual, tl.int8, NARROW // 2 if NARROW > 1 else 1)
    else:
        lower = pointer(residual, tl.int16, NARROW)
    return lower


@triton.jit  # type: ignore[untyped-decorator]
def join_parts(upper, lower, HALVES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the fp32 master weights, joined from their high and low halves (`halves.join`)."""
    # The shift converts the 8-bit half to units of a 16-bit half.
    return join_halves(upper, lower.to(tl.int32) << 8) if HALVES == 8 else join_halves(upper, lower)


@triton.jit  # type: ignore[untyped-decorator]
def parts_of(exact, bits, HALVES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the high and low halves of fp32 master weights. Masters of 24 bits are rounded by random
    integers (`compact.draws`).
    """
    if HALVES == 8:
        upper, lower = split_by_chance(exact, ((bits * STEP_STRIDE) >> LAST_BITS).to(tl.int32))
    else:
        upper, lower = upper_half(exact)
    return upper, lower


@triton.jit  # type: ignore[untyped-decorator]
def update_compact(  # type: ignore[no-untyped-def]
    weight, residual, first_moment, second_moment, gradient, first_scaling, second_scaling,
    begin, left, scalars, coefficient,
    HALVES: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr,
    CLIPS: tl.constexpr, ALIGNED: tl.constexpr, NARROW: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Update `BLOCK` elements by AdamW from `begin` at these addresses, one quantization group per row. With
    `MASKED`, update only the first `left` elements.
    """
    rows = tl.arange(0, BLOCK // GROUP)
    at = rows[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = at < left if MASKED else None
    inside = rows * GROUP < left if MASKED else None
    fill = 0 if MASKED else None
    first_at = pointer(first_moment, tl.int8, NARROW // 2 if NARROW > 1 else 1) + begin + at
    second_at = pointer(second_moment, tl.uint8, NARROW // 2 if NARROW > 1 else 1) + begin + at
    first_scales = first_scaling.to(tl.pointer_type(tl.float32)) + begin // GROUP + rows
    second_scales = second_scaling.to(tl.pointer_type(tl.float32)) + begin // GROUP + rows
    if HALVES:
        weights = pointer(weight, tl.int16, NARROW) + begin + at
        residuals = pointer_to_lower(residual, HALVES, NARROW) + begin + at
        gradients = pointer(gradient, tl.bfloat16, NARROW) + begin + at
        upper = tl.load(weights, mask=mask, other=fill)
        lower = tl.load(residuals, mask=mask, other=fill)
        exact = join_parts(upper, lower, HALVES)
    else:
        weights = pointer(weight, tl.float32, ALIGNED) + begin + at
        gradients = pointer(gradient, tl.float32, ALIGNED) + begin + at
        exact = tl.load(weights, mask=mask, other=fill)
    slope = tl.load(gradients, mask=mask, other=fill).to(tl.float32)
    first = tl.load(first_at, mask=mask, other=fill).to(tl.float32)
    second = tl.load(second_at, mask=mask, other=fill).to(tl.float32)
    first_scale = tl.load(first_scales, mask=inside, other=fill)
    second_scale = tl.load(second_scales, mask=inside, other=fill)
    first = first * tl.abs(first) * (first_scale * FIRST_SHARE)[:, None]
    second = second * second
    second = second * second * (second_scale * SECOND_SHARE)[:, None]

    if CLIPS:
        slope = slope * coefficient
    exact, first, second = adamw(exact, slope, first, second, scalars, EXACT)
    bits = hash_of(begin + at, tl.load(scalars + 7).to(tl.int32))
    first_scale, second_scale = tl.max(tl.abs(first), 1), tl.max(second, 1)
    first_chance = ((bits & 0xFFFF).to(tl.float32) + 0.5) * (1.0 / 65536)
    second_chance = ((bits >> 16).to(tl.float32) + 0.5) * (1.0 / 65536)

    first = first_codes(first, first_scale, first_chance, EXACT)
    second = second_codes(second, second_scale, second_chance, EXACT)
    tl.store(first_at, first.to(tl.int8), mask=mask)
    tl.store(second_at, second.to(tl.uint8), mask=mask)
    tl.store(first_scales, first_scale, mask=inside)
    tl.store(second_scales, second_scale, mask=inside)
    if HALVES:
        upper, lower = parts_of(exact, bits, HALVES)
        tl.store(weights, upper, mask=mask)
        tl.store(residuals, lower, mask=mask)
    else:
        tl.store(weights, exact, mask=mask)
