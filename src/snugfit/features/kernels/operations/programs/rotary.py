"""Rotary embedding of queries and keys in Triton, inside the joint product of queries, keys and values.

A token's row contains the heads of queries, then of keys, then of values. A program processes a token, and
some of its heads at a time. They are two tiles, the left and the right columns of pairs that are rotated into
each other. With `NORMS` each head is normed before, as Qwen3 and Gemma 3 do. `STEP` is the distance from one
query head to the next. It is twice the width of a head if a gate follows each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

WARPS = 4

TILE = 2048
"""Number of elements of heads that one kernel program processes at a time."""


@triton.jit  # type: ignore[untyped-decorator]
def columns_of(lane, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the left and the right column of each pair of a head's columns, in a Triton program.

    The pairs behind `PAIRS` have the columns that are not rotated.
    """
    left = lane
    right = lane + HALF
    if INTERLEAVED:
        left = tl.where(lane < PAIRS, 2 * lane, lane + PAIRS)
        right = tl.where(lane < PAIRS, 2 * lane + 1, lane + HALF)
    elif PAIRS < HALF:
        left = tl.where(lane < PAIRS, lane, lane + PAIRS)
        right = tl.where(lane < PAIRS, lane + PAIRS, lane + HALF)
    return left, right


@triton.jit  # type: ignore[untyped-decorator]
def angles_of(cosines, sines, begin, lane, PAIRS: tl.constexpr, RIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a token's rotary cosines and sines of left and of right columns, (1, WIDTH) each, in a Triton
    program. Those of right columns begin at `RIGHT`. Columns that are not rotated have an angle of zero.
    """
    inside = lane < PAIRS
    at = begin + lane
    cosine = tl.load(cosines + at, mask=inside, other=1.0).to(tl.float32)[None, :]
    cosine_2 = tl.load(cosines + at + RIGHT, mask=inside, other=1.0).to(tl.float32)[None, :]
    sine = tl.load(sines + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    sine_2 = tl.load(sines + at + RIGHT, mask=inside, other=0.0).to(tl.float32)[None, :]
    return cosine, cosine_2, sine, sine_2


@triton.jit  # type: ignore[untyped-decorator]
def starts_of(head, QUERIES: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the column of the joint product at which each query or key head begins, in a Triton program."""
    starts = head * (2 * HALF)
    if STEP > 2 * HALF:
        starts += tl.minimum(head, QUERIES) * (STEP - 2 * HALF)
    return starts


@triton.jit(do_not_specialize=("length",))  # type: ignore[untyped-decorator]
def turn(  # type: ignore[no-untyped-def]
    product, out, cosines, sines, query_scale, key_scale, eps, length, row_in, row_out, apart, angles,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, RIGHT: tl.constexpr,
    STEP: tl.constexpr, INTERLEAVED: tl.constexpr, NORMS: tl.constexpr, FROM_ONE: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Triton kernel: apply rotary embedding to a token's query and key heads, and write them to `out`, which
    may be the input. `apart` is the stride of the cosines between sequences, and `angles` that between
    tokens.
    """
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    # In place, the columns that are not rotated stay.
    inside = lane < (HALF if NORMS else PAIRS)
    left_column, right_column = columns_of(lane, HALF, PAIRS, INTERLEAVED)
    # All sequences may share the angles (`apart` is 0).
    position = (token // length) * apart + (token % length) * angles
    cosine, cosine_2, sine, sine_2 = angles_of(cosines, sines, position, lane, PAIRS, RIGHT)
    for first in range(0, QUERIES + KEYS, HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        mask = (head < QUERIES + KEYS) & inside[None, :]
        start = starts_of(head, QUERIES, HALF, STEP)
        row = product + token * row_in
        # The columns of a pair are loaded as two tiles, because they are rotated into each other.
        left = tl.load(row + start + left_column[None, :], mask=mask, other=0.0).to(tl.float32)
        right = tl.load(row + start + right_column[None, :], mask=mask, other=0.0).to(tl.float32)
        if NORMS:
            square = tl.sum(left * left, 1) + tl.sum(right * right, 1)
            root = (1.0 / tl.sqrt_rn(square / (2 * HALF) + eps))[:, None]
            scale, scale_2 = scales_of(query_scale, key_scale, head, left_column, right_column, QUERIES, mask)
            if FROM_ONE:
                scale, scale_2 = 1.0 + scale, 1.0 + scale_2
            left, right = left * root * scale, right * root * scale_2
            # Gates are not copied.
            start = head * (2 * HALF)
        turned = left * cosine - right * sine
        turned_2 = right * cosine_2 + left * sine_2
        into = out + token * row_out + start
        tl.store(into + left_column[None, :], turned.to(out.dtype.element_ty), mask=mask)
        tl.store(into + right_column[None, :], turned_2.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def scales_of(  # type: ignore[no-untyped-def]
    query_scale, key_scale, head, left_column, right_column, QUERIES: tl.constexpr, mask
):  # fmt: skip
    """Load the RMSNorm scales of each head's left and right columns, those of queries or those of keys, in a
    Triton program.
    """
    of_query = mask & (head < QUERIES)
    # For each head, one of the two masks is empty, so the sum selects one scale.
    of_key = mask & (head >= QUERIES)
    at = left_column[None, :] + head * 0
    left = tl.load(query_scale + at, mask=of_query, other=0.0).to(tl.float32)
    left += tl.load(key_scale + at, mask=of_key, other=0.0).to(tl.float32)
    at = right_column[None, :] + head * 0
    right = tl.load(query_scale + at, mask=of_query, other=0.0).to(tl.float32)
    right += tl.load(key_scale + at, mask=of_key, other=0.0).to(tl.float32)
    return left, right


@triton.jit  # type: ignore[untyped-decorator]
def through_norm(  # type: ignore[no-untyped-def]
    left, right, row, at, at_2, query_scale, key_scale, head, left_column, right_column, eps, mask,
    QUERIES: tl.constexpr, HALF: tl.constexpr, FROM_ONE: tl.constexpr,
):  # fmt: skip
    """Compute the backward pass of the heads' RMSNorm: return the gradients of its input and of its scale,
    both for left and for right columns.
    """
    value = tl.load(row + at, mask=mask, other=0.0).to(tl.float32)
    value_2 = tl.load(row + at_2, mask=mask, other=0.0).to(tl.float32)
    # The root is computed again, because the product was saved before its norm.
    square = tl.sum(value * value, 1) + tl.sum(value_2 * value_2, 1)
    root = (1.0 / tl.sqrt_rn(square / (2 * HALF) + eps))[:, None]
    value, value_2 = value * root, value_2 * root
    of_scale, of_scale_2 = left * value, right * value_2
    scale, scale_2 = scales_of(query_scale, key_scale, head, left_column, right_column, QUERIES, mask)
    if FROM_ONE:
        scale, scale_2 = 1.0 + scale, 1.0 + scale_2
    left, right = left * scale, right * scale_2
    share = ((tl.sum(left * value, 1) + tl.sum(right * value_2, 1)) / (2 * HALF))[:, None]
    left, right = (left - value * share) * root, (right - value_2 * share) * root
    return left, right, of_scale, of_scale_2


@triton.jit  # type: ignore[untyped-decorator]
def copy_heads(  # type: ignore[no-untyped-def]
    source, into, apart, lane, HEADS_IN_ALL: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Copy attention heads that are `apart` elements from each other to where they are `STEP` apart."""
    inside = lane < HALF
    for first in range(0, HEADS_IN_ALL, HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        mask = (head < HEADS_IN_ALL) & inside[None, :]
        left = tl.load(source + head * apart + lane[None, :], mask=mask)
        right = tl.load(source + head * apart + lane[None, :] + HALF, mask=mask)
        at = head * STEP + lane[None, :]
        tl.store(into + at, left.to(into.dtype.element_ty), mask=mask)
        tl.store(into + at + HALF, right.to(into.dtype.element_ty), mask=mask)


@triton.jit
def load_columns(of_query, of_key, column, of_queries, of_keys):  # type: ignore[no-untyped-def]
    """Load these columns of query heads and of key heads, as selected by two masks, in a Triton program."""
    # For each head, one of the two masks is empty.
    value = tl.load(of_query + column[None, :], mask=of_queries, other=0.0).to(tl.float32)
    return value + tl.load(of_key + column[None, :], mask=of_keys, other=0.0).to(tl.float32)


@triton.jit
def store_columns(into, left, right, left_column, right_column, inside):  # type: ignore[no-untyped-def]
    """Store the left and the right columns of one row, in a Triton program."""
    tl.store(into + left_column, left, mask=inside)
    tl.store(into + right_column, right, mask=inside)


@triton.jit(do_not_specialize=("tokens", "length"))  # type: ignore[untyped-decorator]
def turn_back(  # type: ignore[no-untyped-def]
    of_query, of_key, of_value, of_gate, product, into, cosines, sines, query_scale, key_scale, sums, eps,
    tokens, length, apart, angles, row_in, row_out, query_batch, query_head, query_token, key_batch, key_head,
    key_token, value_batch, value_head, value_token, gate_batch, gate_head, gate_token,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, RIGHT: tl.constexpr,
    STEP: tl.constexpr, INTERLEAVED: tl.constexpr, NORMS: tl.constexpr, FROM_ONE: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Triton kernel: rotate gradients of queries, keys and values back, and write them as rows of the joint
    product's gradient. With `NORMS`, also write a row of sums for the gradients of both scales (4, HALF).
    """
    program = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    inside = lane < HALF
    left_column, right_column = columns_of(lane, HALF, PAIRS, INTERLEAVED)
    query_sum = tl.zeros((WIDTH,), dtype=tl.float32)
    query_sum_2 = tl.zeros((WIDTH,), dtype=tl.float32)
    key_sum = tl.zeros((WIDTH,), dtype=tl.float32)
    key_sum_2 = tl.zeros((WIDTH,), dtype=tl.float32)
    programs = tl.num_programs(0)
    for index in range(tl.cdiv(tokens - program, programs)):
        token = (program + index * programs).to(tl.int64)
        batch, position = token // length, token % length
        begin = batch * apart + position * angles
        cosine, cosine_2, sine, sine_2 = angles_of(cosines, sines, begin, lane, PAIRS, RIGHT)
        queries = of_query + batch * query_batch + position * query_token
        keys = of_key + batch * key_batch + position * key_token
        for first in range(0, QUERIES + KEYS, HEADS):
            head = first + tl.arange(0, HEADS)[:, None]
            mask = (head < QUERIES + KEYS) & inside[None, :]
            of_queries, of_keys = mask & (head < QUERIES), mask & (head >= QUERIES)
            of_head, of_head_2 = queries + head * query_head, keys + (head - QUERIES) * key_head
            turned = load_columns(of_head, of_head_2, left_column, of_queries, of_keys)
            turned_2 = load_columns(of_head, of_head_2, right_column, of_queries, of_keys)
            left = turned * cosine + turned_2 * sine_2
            right = turned_2 * cosine_2 - turned * sine
            start = starts_of(head, QUERIES, HALF, STEP)
            at, at_2 = start + left_column[None, :], start + right_column[None, :]
            if NORMS:
                left, right, of_scale, of_scale_2 = through_norm(
                    left, right, product + token * row_in, at, at_2, query_scale, key_scale, head,
                    left_column, right_column, eps, mask, QUERIES, HALF, FROM_ONE,
                )  # fmt: skip
                query_sum += tl.sum(tl.where(of_queries, of_scale, 0.0), 0)
                query_sum_2 += tl.sum(tl.where(of_queries, of_scale_2, 0.0), 0)
                key_sum += tl.sum(tl.where(of_keys, of_scale, 0.0), 0)
                key_sum_2 += tl.sum(tl.where(of_keys, of_scale_2, 0.0), 0)
            tl.store(into + token * row_out + at, left.to(into.dtype.element_ty), mask=mask)
            tl.store(into + token * row_out + at_2, right.to(into.dtype.element_ty), mask=mask)
        values = of_value + batch * value_batch + position * value_token
        behind = into + token * row_out + QUERIES * STEP + KEYS * (2 * HALF)
        copy_heads(values, behind, value_head, lane, KEYS, HALF, 2 * HALF, HEADS)
        if STEP > 2 * HALF:
            gates = of_gate + batch * gate_batch + position * gate_token
            copy_heads(gates, into + token * row_out + 2 * HALF, gate_head, lane, QUERIES, HALF, STEP, HEADS)
    if NORMS:
        of_program = sums + program.to(tl.int64) * (4 * HALF)
        store_columns(of_program, query_sum, query_sum_2, left_column, right_column, inside)
        store_columns(of_program + 2 * HALF, key_sum, key_sum_2, left_column, right_column, inside)


def rotate(
    product: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, length: int, heads: Sequence[int]
) -> None:
    """Rotate queries and keys in place, in a product (T, N), by angles (1 or B, S, columns) without gaps.

    `heads` are the fields of `Heads`.
    """
    # Without norms the kernel reads no scales, so any pointer is valid.
    _launch((product, product), (cosines, sines), (cosines, cosines, 0.0, False), length, heads, norms=False)


def norm_and_rotate(
    product: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    eps: float,
    from_one: bool,
    length: int,
    heads: Sequence[int],
    *,
    out: torch.Tensor,
) -> None:
    """Normalize heads by scales (D,), and write them rotated (T, heads * D)."""
    _launch((product, out), (cosines, sines), (queries, keys, eps, from_one), length, heads, norms=True)


def _launch(
    pair: tuple[torch.Tensor, torch.Tensor],
    angles: tuple[torch.Tensor, torch.Tensor],
    norms_of: tuple[torch.Tensor, torch.Tensor, float, bool],
    length: int,
    heads: Sequence[int],
    *,
    norms: bool,
) -> None:
    product, out = pair
    *scales, from_one = norms_of
    turn[(len(product),)](
        product, out, *angles, *scales, length, product.stride(0), out.stride(0), *_strides(angles[0]),
        NORMS=norms, FROM_ONE=from_one, **_constants(heads), num_warps=WARPS,
    )  # fmt: skip


def rotate_backward(
    of_query: torch.Tensor,
    of_key: torch.Tensor,
    of_value: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    heads: Sequence[int],
    *,
    into: torch.Tensor,
) -> None:
    """Write gradients of queries, keys and values (B, heads, S, D), rotated back, as rows of the product's
    (T, N)."""
    _launch_backward(
        (of_query, of_key, of_value, of_value), (cosines, sines), (cosines, cosines), (into, into, cosines),
        0.0, False, heads, programs=len(into), norms=False,
    )  # fmt: skip


def norm_and_rotate_backward(
    of_query: torch.Tensor,
    of_key: torch.Tensor,
    of_value: torch.Tensor,
    of_gate: torch.Tensor | None,
    product: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    eps: float,
    from_one: bool,
    heads: Sequence[int],
    *,
    into: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Do the same as `rotate_backward` for heads with an RMSNorm before the rotation; also write partial sums
    of the scales' gradients. Gradients of gates are copied.
    """
    gradients = of_query, of_key, of_value, of_value if of_gate is None else of_gate
    _launch_backward(
        gradients, (cosines, sines), (queries, keys), (product, into, sums), eps, from_one, heads,
        programs=len(sums), norms=True,
    )  # fmt: skip


def _launch_backward(
    gradients: tuple[torch.Tensor, ...],
    angles: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor, torch.Tensor],
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    eps: float,
    from_one: bool,
    heads: Sequence[int],
    *,
    programs: int,
    norms: bool,
) -> None:
    product, into, sums = buffers
    strides = [stride for gradient in gradients for stride in gradient.stride()[:3]]
    turn_back[(programs,)](
        *gradients, product, into, *angles, *scales, sums, eps, len(into), gradients[0].size(2),
        *_strides(angles[0]), product.stride(0), into.stride(0), *strides, NORMS=norms, FROM_ONE=from_one,
        **_constants(heads), num_warps=WARPS,
    )  # fmt: skip


def _strides(cosines: torch.Tensor) -> tuple[int, int]:
    """Return the distance in elements of rotary cosines from one sequence to the next, and from one token to
    the next. The first is 0 if all sequences share them.
    """
    return 0 if cosines.size(0) == 1 else cosines.stride(0), cosines.stride(1)


def _constants(heads: Sequence[int]) -> dict[str, int]:
    """Return the constants of the kernels by name, from the fields of `Heads`.

    A kernel program processes some heads at a time, whose lanes are a power of two of at least half a head.
    """
    queries, keys, width, pairs, interleaved, shared_angles, gated = heads
    half = triton.next_power_of_2(width // 2)
    return {
        "QUERIES": queries, "KEYS": keys, "HALF": width // 2, "PAIRS": pairs,
        "RIGHT": 0 if interleaved or shared_angles else pairs, "STEP": width * (1 + gated),
        "INTERLEAVED": bool(interleaved),
        "HEADS": min(triton.next_power_of_2(queries + keys), max(TILE // half, 1)), "WIDTH": half,
    }  # fmt: skip
