"""Rotary embedding of queries and keys within their joint matrix product, and the norm of heads before it.

A row of the product has the heads of queries, then of keys, then of values. Without norms the rotation is
done in place. With norms (Qwen3, Gemma 3) the product is saved, and the rotated heads are written to another
tensor. In Qwen3.5 a gate of the same width follows each query head, and is not rotated.

A rotation turns pairs of a head's columns. They are a column and another half of the rotated columns behind
it, or two neighbours (GLM-4). Some models rotate only a head's first columns (Phi-4-mini).

Between norm and rotation nothing is rounded: both are computed in 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from snugfit.features.kernels.operations.column_sums import add_partials
from snugfit.features.kernels.operations.operators import define, has_kernel

PROGRAMS = 528
"""Number of kernel programs in a backward pass with norms (chosen). Each writes one row of partial sums."""

_ROTATE = define(
    "rotate(Tensor(a!) product, Tensor cosines, Tensor sines, int length, int[] heads) -> ()", "rotary"
)
_NORM_AND_ROTATE = define(
    "norm_and_rotate(Tensor product, Tensor cosines, Tensor sines, Tensor queries, Tensor keys, float eps, "
    "bool from_one, int length, int[] heads, *, Tensor(a!) out) -> ()",
    "rotary",
)
_ROTATE_BACKWARD = define(
    "rotate_backward(Tensor of_query, Tensor of_key, Tensor of_value, Tensor cosines, Tensor sines, int[] "
    "heads, *, Tensor(a!) into) -> ()",
    "rotary",
)
_NORM_AND_ROTATE_BACKWARD = define(
    "norm_and_rotate_backward(Tensor of_query, Tensor of_key, Tensor of_value, Tensor? of_gate, Tensor "
    "product, Tensor cosines, Tensor sines, Tensor queries, Tensor keys, float eps, bool from_one, int[] "
    "heads, *, Tensor(a!) into, Tensor(b!) sums) -> ()",
    "rotary",
)


class Heads(NamedTuple):
    """Heads in a row of the joint product of queries, keys and values, and their rotation."""

    queries: int
    keys: int
    """Number of key heads, equal to the number of value heads."""
    width: int
    pairs: int
    """Number of pairs of columns of a head that are rotated: half its width, or less."""
    interleaved: bool = False
    """True if the columns of a pair are neighbours."""
    shared_angles: bool = False
    """True if cosines and sines have one column for a pair, and not one for each of its columns."""
    gated: bool = False
    """True if a gate follows each query head. Such heads have norms."""

    @property
    def numbers(self) -> list[int]:
        """Return all fields as an operator takes them."""
        return list(map(int, self))

    @property
    def columns(self) -> int:
        """Return the number of columns of all queries and keys, without gates."""
        return (self.queries + self.keys) * self.width

    @property
    def ends(self) -> tuple[int, int]:
        """Return the columns of the product at which queries and keys end; gates belong to the queries."""
        end = self.queries * self.width * (1 + self.gated)
        return end, end + self.keys * self.width


class Norms(NamedTuple):
    """Settings of the RMSNorm that Qwen3 and Gemma 3 apply to each query and key head before its rotation."""

    queries: torch.Tensor  # (D,)
    keys: torch.Tensor  # (D,)
    eps: float
    from_one: bool
    """True if the norm multiplies by one plus the learned scale, as in Gemma."""


Angles = tuple[torch.Tensor, torch.Tensor]
"""The type of rotary angles: cosines and sines, each (1 or B, S, columns); at most D columns.

Further columns than the rotated ones of a head are not read.
"""


def rotate(
    product: torch.Tensor, angles: Angles, length: int, heads: Heads, norms: Norms | None
) -> torch.Tensor:
    """Return rotated queries and keys (T, heads * D) of sequences of this length.

    They are rotated in place, or with `norms` in another tensor.
    """
    if not has_kernel(product):
        turned = reference(product, angles, length, heads, norms)
        if norms is not None:
            return turned
        product[:, : heads.columns].copy_(turned)
        return product[:, : heads.columns]
    if norms is None:
        _ROTATE(product, *angles, length, heads.numbers)
        return product[:, : heads.columns]
    # The norm's backward pass needs the product, so the rotation must not overwrite it.
    out = product.new_empty((len(product), heads.columns))
    _NORM_AND_ROTATE(product, *angles, *norms, length, heads.numbers, out=out)
    return out


def rotate_backward(
    gradients: Sequence[torch.Tensor],
    angles: Angles,
    product: torch.Tensor | None,
    heads: Heads,
    norms: Norms | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of the joint projection (T, N) and of both norms' scales; None for scales without
    norms.

    The input is the gradients of queries, keys, values and, if there are gates, of these (B, heads, S, D).
    """
    if not has_kernel(gradients[0]):
        return reference_backward(gradients, angles, product, heads, norms)
    # The kernel supports any strides except for the last dimension.
    query, key, value, *gates = (
        gradient if gradient.stride(-1) == 1 else gradient.contiguous() for gradient in gradients
    )
    tokens = query.size(0) * query.size(2)
    into = query.new_empty((tokens, heads.ends[1] + heads.keys * heads.width))
    # The gradient of a rotation is the opposite rotation, which only needs the angles.
    if norms is None or product is None:
        _ROTATE_BACKWARD(query, key, value, *angles, heads.numbers, into=into)
        return into, None, None
    sums = query.new_empty((min(tokens, PROGRAMS), 2 * heads.width), dtype=torch.float32)
    gate = gates[0] if gates else None
    _NORM_AND_ROTATE_BACKWARD(
        query, key, value, gate, product, *angles, *norms, heads.numbers, into=into, sums=sums
    )
    of_queries, of_keys = add_partials(sums[None], norms.queries.dtype)[0].chunk(2)
    return into, of_queries, of_keys


# ---- plain torch ----------------------------------------------------------------------------------------


def reference(
    product: torch.Tensor, angles: Angles, length: int, heads: Heads, norms: Norms | None
) -> torch.Tensor:
    """Return rotated queries and keys (T, heads * D), computed in plain torch."""
    wide = torch.promote_types(product.dtype, torch.float32)
    value = _queries_and_keys(product, heads).unflatten(0, (-1, length)).to(wide)  # (B, S, heads, D)
    if norms is not None:
        value = _norm_heads(value, norms, wide)[0] * _scales(norms, heads, wide)
    cosines, sines = (_by_pair(angle, heads, wide) for angle in angles)
    left, right, rest = _pairs(value, heads)
    turned = (left * cosines[0] - right * sines[0], right * cosines[1] + left * sines[1])
    return _join_pairs(*turned, rest, heads).to(product.dtype).flatten(2).flatten(0, 1)


def reference_backward(
    gradients: Sequence[torch.Tensor],
    angles: Angles,
    product: torch.Tensor | None,
    heads: Heads,
    norms: Norms | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Compute the gradients of `rotate` in plain torch, as a reference for the kernel `rotate_backward`."""
    query, key, value, *gates = (gradient.transpose(1, 2) for gradient in gradients)  # (B, S, heads, D)
    wide = torch.promote_types(query.dtype, torch.float32)
    cosines, sines = (_by_pair(angle, heads, wide) for angle in angles)
    left, right, rest = _pairs(torch.cat([query, key], 2).to(wide), heads)
    turned = (left * cosines[0] + right * sines[1], right * cosines[1] - left * sines[0])
    slope = _join_pairs(*turned, rest, heads)
    of_queries = of_keys = None
    if norms is not None and product is not None:
        of_heads = _queries_and_keys(product, heads).reshape(slope.shape)
        normed, roots = _norm_heads(of_heads, norms, wide)
        shares = (slope * normed).sum((0, 1))
        of_queries = shares[: heads.queries].sum(0).to(norms.queries.dtype)
        of_keys = shares[heads.queries :].sum(0).to(norms.keys.dtype)
        slope = slope * _scales(norms, heads, wide)
        slope = (slope - normed * (slope * normed).mean(-1, keepdim=True)) * roots
    of_query, of_key = slope.to(query.dtype).split([heads.queries, heads.keys], 2)
    # A gate follows its query head.
    of_query = torch.cat([of_query, *gates], 3)
    parts = [part.flatten(2) for part in (of_query, of_key, value)]
    return torch.cat(parts, 2).flatten(0, 1), of_queries, of_keys


def gates_of(product: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Return the gates (T, heads, D) of the queries as a view of the product (T, N)."""
    return product[:, : heads.ends[0]].view(len(product), heads.queries, -1)[..., heads.width :]


def _queries_and_keys(product: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Return the queries and keys (T, heads, D) of the product (T, N), without gates."""
    if not heads.gated:
        return product[:, : heads.columns].reshape(len(product), -1, heads.width)
    first, last = heads.ends
    queries = product[:, :first].view(len(product), heads.queries, -1)[..., : heads.width]
    return torch.cat([queries, product[:, first:last].view(len(product), heads.keys, -1)], 1)


def _pairs(value: torch.Tensor, heads: Heads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the left and the right columns of all rotated pairs, and the columns that are not rotated."""
    turned, rest = value[..., : 2 * heads.pairs], value[..., 2 * heads.pairs :]
    if heads.interleaved:
        return turned[..., ::2], turned[..., 1::2], rest
    return turned[..., : heads.pairs], turned[..., heads.pairs :], rest


def _join_pairs(left: torch.Tensor, right: torch.Tensor, rest: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Return heads (..., D) from the columns of their pairs and their other columns (`_pairs`)."""
    turned = torch.stack((left, right), -1).flatten(-2) if heads.interleaved else torch.cat((left, right), -1)
    return torch.cat((turned, rest), -1) if rest.size(-1) else turned


def _by_pair(angle: torch.Tensor, heads: Heads, wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines or sines (B, S, 1, pairs) of the left and of the right columns of pairs.

    They are equal for all heads.
    """
    columns = angle.to(wide)[:, :, None]
    left = columns[..., : heads.pairs]
    shares = heads.interleaved or heads.shared_angles
    return left, left if shares else columns[..., heads.pairs : 2 * heads.pairs]


def _norm_heads(value: torch.Tensor, norms: Norms, wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    value = value.to(wide)
    roots = torch.rsqrt(value.square().mean(-1, keepdim=True) + norms.eps)
    return value * roots, roots


def _scales(norms: Norms, heads: Heads, wide: torch.dtype) -> torch.Tensor:
    """Return the scales (heads, D) of the norms of all heads of queries and keys."""
    parts = norms.queries.expand(heads.queries, -1), norms.keys.expand(heads.keys, -1)
    scale = torch.cat(parts).to(wide)
    return 1.0 + scale if norms.from_one else scale
