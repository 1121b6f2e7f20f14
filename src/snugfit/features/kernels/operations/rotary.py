"""Rotary embedding of queries and keys within their joint matrix product, and the norm of heads before it.

A row of the product has the heads of queries, then of keys, then of values. Without norms the rotation is
done in place. With norms (Qwen3, Gemma 3) the product is saved, and the rotated heads are written to another
tensor.

Between norm and rotation nothing is rounded: both are computed in 32 bits.
"""

from __future__ import annotations

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
    "rotate_backward(Tensor of_query, Tensor of_key, Tensor of_value, Tensor cosines, Tensor sines, *, "
    "Tensor(a!) into) -> ()",
    "rotary",
)
_NORM_AND_ROTATE_BACKWARD = define(
    "norm_and_rotate_backward(Tensor of_query, Tensor of_key, Tensor of_value, Tensor product, Tensor "
    "cosines, Tensor sines, Tensor queries, Tensor keys, float eps, bool from_one, *, Tensor(a!) into, "
    "Tensor(b!) sums) -> ()",
    "rotary",
)


class Heads(NamedTuple):
    """Numbers of query, key and value heads in a row of their joint product, and the width of a head."""

    queries: int
    keys: int
    """Number of key heads, equal to the number of value heads."""
    width: int


class Norms(NamedTuple):
    """Settings of the RMSNorm that Qwen3 and Gemma 3 apply to each query and key head before its rotation."""

    queries: torch.Tensor  # (D,)
    keys: torch.Tensor  # (D,)
    eps: float
    from_one: bool
    """True if the norm multiplies by one plus the learned scale, as in Gemma."""


Angles = tuple[torch.Tensor, torch.Tensor]
"""The type of rotary angles: cosines and sines, each (1 or B, S, D)."""


def rotate(
    product: torch.Tensor, angles: Angles, length: int, heads: Heads, norms: Norms | None
) -> torch.Tensor:
    """Return rotated queries and keys (T, heads * D) of sequences of this length.

    They are rotated in place, or with `norms` in another tensor.
    """
    count = (heads.queries + heads.keys) * heads.width
    if not has_kernel(product):
        turned = reference(product[:, :count], angles, length, heads, norms)
        if norms is not None:
            return turned
        product[:, :count].copy_(turned)
        return product[:, :count]
    if norms is None:
        _ROTATE(product, *angles, length, list(heads))
        return product[:, :count]
    # The norm's backward pass needs the product, so the rotation must not overwrite it.
    out = product.new_empty((len(product), count))
    _NORM_AND_ROTATE(product, *angles, *norms, length, list(heads), out=out)
    return out


def rotate_backward(
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    angles: Angles,
    product: torch.Tensor | None,
    norms: Norms | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of the joint projection (T, N) and of both norms' scales; None for scales without
    norms.

    The input is the gradients of queries, keys and values (B, heads, S, D).
    """
    if not has_kernel(gradients[0]):
        return reference_backward(gradients, angles, product, norms)
    # The kernel supports any strides except for the last dimension.
    query, key, value = (
        gradient if gradient.stride(-1) == 1 else gradient.contiguous() for gradient in gradients
    )
    tokens, width = query.size(0) * query.size(2), query.size(3)
    into = query.new_empty((tokens, (query.size(1) + 2 * key.size(1)) * width))
    # The gradient of a rotation is the opposite rotation, which only needs the angles.
    if norms is None or product is None:
        _ROTATE_BACKWARD(query, key, value, *angles, into=into)
        return into, None, None
    sums = query.new_empty((min(tokens, PROGRAMS), 2 * width), dtype=torch.float32)
    _NORM_AND_ROTATE_BACKWARD(query, key, value, product, *angles, *norms, into=into, sums=sums)
    of_queries, of_keys = add_partials(sums[None], norms.queries.dtype)[0].chunk(2)
    return into, of_queries, of_keys


# ---- plain torch ----------------------------------------------------------------------------------------


def reference(
    product: torch.Tensor, angles: Angles, length: int, heads: Heads, norms: Norms | None
) -> torch.Tensor:
    """Return rotated queries and keys (T, heads * D), computed in plain torch."""
    wide = torch.promote_types(product.dtype, torch.float32)
    value = product.reshape(-1, length, heads.queries + heads.keys, heads.width).to(wide)  # (B, S, heads, D)
    if norms is not None:
        value = _norm_heads(value, norms, wide)[0] * _scales(norms, heads, wide)
    cosines, sines = (angle.to(wide)[:, :, None] for angle in angles)
    turned = value * cosines + _quarter_turn(value) * sines
    return turned.to(product.dtype).flatten(2).flatten(0, 1)


def reference_backward(
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    angles: Angles,
    product: torch.Tensor | None,
    norms: Norms | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Compute the gradients of `rotate` in plain torch, as a reference for the kernel `rotate_backward`."""
    query, key, value = (gradient.transpose(1, 2) for gradient in gradients)  # (B, S, heads, D)
    heads = Heads(query.size(2), key.size(2), query.size(3))
    wide = torch.promote_types(query.dtype, torch.float32)
    # Angles are equal for all heads.
    cosines, sines = (angle.to(wide)[:, :, None] for angle in angles)
    turned = torch.cat([query, key], 2).to(wide)
    slope = turned * cosines - _quarter_turn(turned * sines)
    of_queries = of_keys = None
    if norms is not None and product is not None:
        count = (heads.queries + heads.keys) * heads.width
        normed, roots = _norm_heads(product[:, :count].reshape(slope.shape), norms, wide)
        shares = (slope * normed).sum((0, 1))
        of_queries = shares[: heads.queries].sum(0).to(norms.queries.dtype)
        of_keys = shares[heads.queries :].sum(0).to(norms.keys.dtype)
        slope = slope * _scales(norms, heads, wide)
        slope = (slope - normed * (slope * normed).mean(-1, keepdim=True)) * roots
    whole = torch.cat([slope.to(query.dtype), value], 2)
    return whole.flatten(2).flatten(0, 1), of_queries, of_keys


def _norm_heads(value: torch.Tensor, norms: Norms, wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    value = value.to(wide)
    roots = torch.rsqrt(value.square().mean(-1, keepdim=True) + norms.eps)
    return value * roots, roots


def _scales(norms: Norms, heads: Heads, wide: torch.dtype) -> torch.Tensor:
    """Return the scales (heads, D) of the norms of all heads of queries and keys."""
    parts = norms.queries.expand(heads.queries, -1), norms.keys.expand(heads.keys, -1)
    scale = torch.cat(parts).to(wide)
    return 1.0 + scale if norms.from_one else scale


def _quarter_turn(value: torch.Tensor) -> torch.Tensor:
    left, right = value.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)
