"""Rotary embedding of queries and keys in Triton, inside the joint product of queries, keys and values.

A token's row contains the heads of queries, then of keys, then of values. A program processes a token, and
some of its heads at a time. They are two tiles, the halves that are rotated into each other. With `NORMS`
each head is normed before, as Qwen3 and Gemma 3 do.
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
def angles_of(cosines, sines, begin, lane, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load both halves of a token's rotary cosines and sines, (1, WIDTH) each, in a Triton program."""
    inside = lane < HALF
    at = begin + lane
    cosine = tl.load(cosines + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    cosine_2 = tl.load(cosines + at + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    sine_2 = tl.load(sines + at + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    return cosine, cosine_2, sine, sine_2


@triton.jit(do_not_specialize=("length",))  # type: ignore[untyped-decorator]
def turn(  # type: ignore[no-untyped-def]
    product, out, cosines, sines, query_scale, key_scale, eps, length, row_in, row_out, apart,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr, NORMS: tl.constexpr,
    FROM_ONE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Triton kernel: apply rotary embedding to a token's query and key heads, and write them to `out`, which
    may be the input. `apart` is the stride of the cosines between sequences.
    """
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    inside = lane < HALF
    # All sequences may share the angles (`apart` is 0).
    position = (token // length) * apart + (token % length) * (2 * HALF)
    cosine, cosine_2, sine, sine_2 = angles_of(cosines, sines, position, lane, HALF)
    for first in range(0, QUERIES + KEYS, HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        mask = (head < QUERIES + KEYS) & inside[None, :]
        at = head * (2 * HALF) + lane[None, :]
        # The halves of a head are loaded as two tiles, because they are rotated into each other.
        left = tl.load(product + token * row_in + at, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(product + token * row_in + at + HALF, mask=mask, other=0.0).to(tl.float32)
        if NORMS:
            square = tl.sum(left * left, 1) + tl.sum(right * right, 1)
            root = (1.0 / tl.sqrt_rn(square / (2 * HALF) + eps))[:, None]
            scale, scale_2 = scales_of(query_scale, key_scale, head, lane, QUERIES, HALF, mask)
            if FROM_ONE:
                scale, scale_2 = 1.0 + scale, 1.0 + scale_2
            left, right = left * root * scale, right * root * scale_2
        turned = left * cosine - right * sine
        turned_2 = right * cosine_2 + left * sine_2
        tl.store(out + token * row_out + at, turned.to(out.dtype.element_ty), mask=mask)
        tl.store(out + token * row_out + at + HALF, turned_2.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def scales_of(  # type: ignore[no-untyped-def]
    query_scale, key_scale, head, lane, QUERIES: tl.constexpr, HALF: tl.constexpr, mask
):  # fmt: skip
    """Load both halves of each head's RMSNorm scale, that of queries or that of keys, in a Triton program."""
    of_query = mask & (head < QUERIES)
    # For each head, one of the two masks is empty, so the sum selects one scale.
    of_key = mask & (head >= QUERIES)
    at = lane[None, :] + head * 0
    left = tl.load(query_scale + at, mask=of_query, other=0.0).to(tl.float32)
    left += tl.load(key_scale + at, mask=of_key, other=0.0).to(tl.float32)
    right = tl.load(query_scale + at + HALF, mask=of_query, other=0.0).to(tl.float32)
    right += tl.load(key_scale + at + HALF, mask=of_key, other=0.0).to(tl.float32)
    return left, right


@triton.jit  # type: ignore[untyped-decorator]
def through_norm(  # type: ignore[no-untyped-def]
    left, right, row, at, query_scale, key_scale, head, lane, eps, mask,
    QUERIES: tl.constexpr, HALF: tl.constexpr, FROM_ONE: tl.constexpr,
):  # fmt: skip
    """Compute the backward pass of the heads' RMSNorm: return the gradients of its input and of its scale,
    both in halves.
    """
    value = tl.load(row + at, mask=mask, other=0.0).to(tl.float32)
    value_2 = tl.load(row + at + HALF, mask=mask, other=0.0).to(tl.float32)
    # The root is computed again, because the product was saved before its norm.
    square = tl.sum(value * value, 1) + tl.sum(value_2 * value_2, 1)
    root = (1.0 / tl.sqrt_rn(square / (2 * HALF) + eps))[:, None]
    value, value_2 = value * root, value_2 * root
    of_scale, of_scale_2 = left * value, right * value_2
    scale, scale_2 = scales_of(query_scale, key_scale, head, lane, QUERIES, HALF, mask)
    if FROM_ONE:
        scale, scale_2 = 1.0 + scale, 1.0 + scale_2
    left, right = left * scale, right * scale_2
    share = ((tl.sum(left * value, 1) + tl.sum(right * value_2, 1)) / (2 * HALF))[:, None]
    left, right = (left - value * share) * root, (right - value_2 * share) * root
    return left, right, of_scale, of_scale_2


@triton.jit  # type: ignore[untyped-decorator]
def copy_heads(  # type: ignore[no-untyped-def]
    source, into, apart, lane, HEADS_IN_ALL: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """Copy attention heads that are `apart` elements from each other into contiguous memory."""
    inside = lane < HALF
    for first in range(0, HEADS_IN_ALL, HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        mask = (head < HEADS_IN_ALL) & inside[None, :]
        left = tl.load(source + head * apart + lane[None, :], mask=mask)
        right = tl.load(source + head * apart + lane[None, :] + HALF, mask=mask)
        at = head * (2 * HALF) + lane[None, :]
        tl.store(into + at, left.to(into.dtype.element_ty), mask=mask)
        tl.store(into + at + HALF, right.to(into.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("tokens", "length"))  # type: ignore[untyped-decorator]
def turn_back(  # type: ignore[no-untyped-def]
    of_query, of_key, of_value, product, into, cosines, sines, query_scale, key_scale, sums, eps, tokens,
    length, apart, row_in, row_out, query_batch, query_head, query_token, key_batch, key_head, key_token,
    value_batch, value_head, value_token, QUERIES: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr,
    NORMS: tl.constexpr, FROM_ONE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Triton kernel: rotate gradients of queries, keys and values back, and write them as rows of the joint
    product's gradient. With `NORMS`, also write a row of sums for the gradients of both scales (4, HALF).
    """
    program = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    inside = lane < HALF
    query_sum = tl.zeros((WIDTH,), dtype=tl.float32)
    query_sum_2 = tl.zeros((WIDTH,), dtype=tl.float32)
    key_sum = tl.zeros((WIDTH,), dtype=tl.float32)
    key_sum_2 = tl.zeros((WIDTH,), dtype=tl.float32)
    programs = tl.num_programs(0)
    for index in range(tl.cdiv(tokens - program, programs)):
        token = (program + index * programs).to(tl.int64)
        batch, position = token // length, token % length
        begin = batch * apart + position * (2 * HALF)
        cosine, cosine_2, sine, sine_2 = angles_of(cosines, sines, begin, lane, HALF)
        queries = of_query + batch * query_batch + position * query_token
        keys = of_key + batch * key_batch + position * key_token
        for first in range(0, QUERIES + KEYS, HEADS):
            head = first + tl.arange(0, HEADS)[:, None]
            mask = (head < QUERIES + KEYS) & inside[None, :]
            of_queries = mask & (head < QUERIES)
            of_keys = mask & (head >= QUERIES)
            at = head * query_head + lane[None, :]
            turned = tl.load(queries + at, mask=of_queries, other=0.0).to(tl.float32)
            turned_2 = tl.load(queries + at + HALF, mask=of_queries, other=0.0).to(tl.float32)
            at = (head - QUERIES) * key_head + lane[None, :]
            turned += tl.load(keys + at, mask=of_keys, other=0.0).to(tl.float32)
            turned_2 += tl.load(keys + at + HALF, mask=of_keys, other=0.0).to(tl.float32)
            left = turned * cosine + turned_2 * sine_2
            right = turned_2 * cosine_2 - turned * sine
            at = head * (2 * HALF) + lane[None, :]
            if NORMS:
                left, right, of_scale, of_scale_2 = through_norm(
                    left, right, product + token * row_in, at, query_scale, key_scale, head, lane, eps, mask,
                    QUERIES, HALF, FROM_ONE,
                )  # fmt: skip
                query_sum += tl.sum(tl.where(of_queries, of_scale, 0.0), 0)
                query_sum_2 += tl.sum(tl.where(of_queries, of_scale_2, 0.0), 0)
                key_sum += tl.sum(tl.where(of_keys, of_scale, 0.0), 0)
                key_sum_2 += tl.sum(tl.where(of_keys, of_scale_2, 0.0), 0)
            tl.store(into + token * row_out + at, left.to(into.dtype.element_ty), mask=mask)
            tl.store(into + token * row_out + at + HALF, right.to(into.dtype.element_ty), mask=mask)
        values = of_value + batch * value_batch + position * value_token
        behind = into + token * row_out + (QUERIES + KEYS) * (2 * HALF)
        copy_heads(values, behind, value_head, lane, KEYS, HALF, HEADS)
    if NORMS:
        row = sums + program.to(tl.int64) * (4 * HALF) + lane
        tl.store(row, query_sum, mask=inside)
        tl.store(row + HALF, query_sum_2, mask=inside)
        tl.store(row + 2 * HALF, key_sum, mask=inside)
        tl.store(row + 3 * HALF, key_sum_2, mask=inside)


def rotate(
    product: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, length: int, heads: Sequence[int]
) -> None:
    """Rotate queries and keys in place, in a product (T, N), by angles (1 or B, S, D) without gaps.

    `heads` are the number of heads of queries and of keys, and the width of each.
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
    (product, out), (queries, keys, width) = pair, heads
    *scales, from_one = norms_of
    turn[(len(product),)](
        product, out, *angles, *scales, length, product.stride(0), out.stride(0), _apart(angles[0]),
        QUERIES=queries, KEYS=keys, HALF=width // 2, NORMS=norms, FROM_ONE=from_one,
        **_tile(queries + keys, width), num_warps=WARPS,
    )  # fmt: skip


def rotate_backward(
    of_query: torch.Tensor,
    of_key: torch.Tensor,
    of_value: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    *,
    into: torch.Tensor,
) -> None:
    """Write gradients of queries, keys and values (B, heads, S, D), rotated back, as rows of the product's
    (T, N)."""
    _launch_backward(
        (of_query, of_key, of_value), (cosines, sines), (cosines, cosines), (into, into, cosines), 0.0, False,
        programs=len(into), norms=False,
    )  # fmt: skip


def norm_and_rotate_backward(
    of_query: torch.Tensor,
    of_key: torch.Tensor,
    of_value: torch.Tensor,
    product: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    eps: float,
    from_one: bool,
    *,
    into: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Do the same as `rotate_backward` for heads with an RMSNorm before the rotation; also write partial sums
    of the scales' gradients.
    """
    _launch_backward(
        (of_query, of_key, of_value), (cosines, sines), (queries, keys), (product, into, sums), eps, from_one,
        programs=len(sums), norms=True,
    )  # fmt: skip


def _launch_backward(
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    angles: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor, torch.Tensor],
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    eps: float,
    from_one: bool,
    *,
    programs: int,
    norms: bool,
) -> None:
    (query, key, _), (product, into, sums) = gradients, buffers
    strides = [stride for gradient in gradients for stride in gradient.stride()[:3]]
    turn_back[(programs,)](
        *gradients, product, into, *angles, *scales, sums, eps, len(into), query.size(2), _apart(angles[0]),
        product.stride(0), into.stride(0), *strides, QUERIES=query.size(1), KEYS=key.size(1),
        HALF=query.size(3) // 2, NORMS=norms, FROM_ONE=from_one,
        **_tile(query.size(1) + key.size(1), query.size(3)), num_warps=WARPS,
    )  # fmt: skip


def _apart(cosines: torch.Tensor) -> int:
    """Return the distance in elements of rotary cosines from one sequence to the next; 0 if all sequences
    share them.
    """
    return 0 if cosines.size(0) == 1 else cosines.stride(0)


def _tile(heads: int, width: int) -> dict[str, int]:
    """Return the number of heads that a kernel program processes at a time, and their width: a power of two
    of at least half a head.
    """
    half = triton.next_power_of_2(width // 2)
    return {"HEADS": min(triton.next_power_of_2(heads), max(TILE // half, 1)), "WIDTH": half}
