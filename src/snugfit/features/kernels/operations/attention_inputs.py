"""Queries, keys and values of a decoder's attention: one matrix product, then normed and rotated in place.

They are views of one product (T, N), as are the gates of Qwen3.5's queries. If heads are normed, queries and
keys are views of the rotated tensor, as (B, heads, S, D). Attention reads the views without a copy. In the
backward pass their gradients become one gradient of the product. One more product gives the gradient of all
three weights, as slices, and another that of x. Frozen weights have adapters where peft put some
(`low_rank.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from snugfit.features.kernels.operations.operators import activation_dtype
from snugfit.features.kernels.operations.products import results_are_kept
from snugfit.features.kernels.operations.projections import JointProduct, Layout, Projections
from snugfit.features.kernels.operations.rms_norm import rows_to_keep
from snugfit.features.kernels.operations.rotary import Angles, Heads, Norms, gates_of, rotate, rotate_backward


def attention_inputs(
    hidden: torch.Tensor,
    angles: Angles,
    heads: Heads,
    projections: Projections,
    norms: Norms | None,
) -> tuple[torch.Tensor, ...]:
    """Return queries, keys, values and, if there are any, gates (B, heads, S, D).

    `hidden` is (B, S, H).
    """
    scales: Sequence[torch.Tensor | None] = (None, None) if norms is None else norms[:2]
    kind = None if norms is None else norms[2:]
    inputs: tuple[torch.Tensor, ...] = AttentionInputs.apply(  # type: ignore[no-untyped-call]
        hidden, *angles, heads, kind, *scales, projections.layout, *projections.tensors
    )
    return inputs


class AttentionInputs(torch.autograd.Function):
    """Autograd function of `attention_inputs`, in autocast's dtype where it is on."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        heads: Heads,
        kind: tuple[float, bool] | None,
        query_scale: torch.Tensor | None,
        key_scale: torch.Tensor | None,
        layout: Layout,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return queries, keys, values and gates; save the weights, and tensors from which the normed input
        is recomputed.

        If heads are normed, save the product too.
        """
        dtype = activation_dtype(hidden)
        batch, length, _ = hidden.shape
        rows = hidden.reshape(batch * length, -1).to(dtype)
        product, joint = JointProduct.start(rows, layout, parameters)
        # Selective checkpointing reuses the product, so it must not be rotated in place.
        if kind is None and joint.update is None and results_are_kept():
            product = product.clone()  # the rotation overwrites it
        angles = cosines.contiguous(), sines.contiguous()
        turned = rotate(product, angles, length, heads, _norms(kind, query_scale, key_scale))
        # Without norms of heads, the gradient of the rotation only needs the angles.
        product_to_keep = product if kind is not None else None
        # The input is normed again in the backward pass, which costs less than saving it.
        needs_rows = joint.needs_rows(ctx.needs_input_grad[8:])
        *source, ctx.scaling = rows_to_keep(hidden, rows, needs_it=needs_rows)
        ctx.save_for_backward(*angles, query_scale, key_scale, product_to_keep, *source, *joint.tensors)
        ctx.kind, ctx.hidden_dtype, ctx.joint = kind, hidden.dtype, joint.settings
        ctx.heads = heads
        end = heads.queries * heads.width
        # Attention reads the parts as views, without a copy.
        parts = [turned[:, :end], turned[:, end:], product[:, heads.ends[1] :]]
        if heads.gated:
            parts.append(gates_of(product, heads))
        return tuple(part.view(batch, length, -1, heads.width).transpose(1, 2) for part in parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of all inputs: one kernel over those of queries, keys and values, then matrix
        products."""
        cosines, sines, query_scale, key_scale, product, *saved = ctx.saved_tensors
        source, joint = saved[:3], JointProduct.restore(ctx.joint, saved[3:])
        norms = _norms(ctx.kind, query_scale, key_scale)
        of_product, *of_scales = rotate_backward(gradients, (cosines, sines), product, ctx.heads, norms)
        of_scales = [
            of_scale if needed else None
            for of_scale, needed in zip(of_scales, ctx.needs_input_grad[5:7], strict=True)
        ]
        # A single product gives the input's gradient from queries, keys and values.
        needs_hidden, needed = ctx.needs_input_grad[0], ctx.needs_input_grad[8:]
        of_hidden, of_parameters = joint.backward(of_product, source, ctx.scaling, needs_hidden, needed)
        if of_hidden is not None:
            batch, _, length, _ = gradients[0].shape
            of_hidden = of_hidden.view(batch, length, -1).to(ctx.hidden_dtype)
        return of_hidden, *[None] * 4, *of_scales, None, *of_parameters


def _norms(
    kind: tuple[float, bool] | None, queries: torch.Tensor | None, keys: torch.Tensor | None
) -> Norms | None:
    if kind is None or queries is None or keys is None:
        return None
    return Norms(queries, keys, *kind)
