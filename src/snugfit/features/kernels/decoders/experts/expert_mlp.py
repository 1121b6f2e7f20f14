"""The experts of a decoder's layer: each token's gated MLPs, times the weights of its router.

Rows of tokens are sorted by expert, and each linear layer is one grouped product. No size depends on the
routing, and the host reads nothing, so a step can be recorded. The forward pass saves at most the product of
gate and up, and the order of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from snugfit.features.kernels.decoders.experts.activation import Gate
from snugfit.features.kernels.decoders.experts.grouped_linear import (
    ExpertLinear,
    GroupedLinear,
    LinearSettings,
    grouped_gradient,
)
from snugfit.features.kernels.decoders.experts.routing import Routing
from snugfit.features.kernels.operations.operators import activation_dtype
from snugfit.features.kernels.operations.rms_norm import rows_again, rows_to_keep

_TENSORS = 4
"""Number of tensors of an `ExpertLinear`: weight, bias, A and B."""


def expert_mlp(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    index: torch.Tensor,
    layers: tuple[ExpertLinear, ExpertLinear],
    experts: int,
    gate: Gate,
    *,
    keeps: bool = True,
) -> torch.Tensor:
    """Return the experts' output (T, H) for tokens (T, H), with their experts (T, k) and weights (T, k).

    `layers` are gate and up (2 * I, H) in one, and down (H, I). `keeps` saves the product of gate and up for
    the backward pass; otherwise it is recomputed there.
    """
    into, back = layers
    output: torch.Tensor = ExpertMLP.apply(  # type: ignore[no-untyped-call]
        hidden,
        weights,
        index,
        (into.settings, back.settings),
        experts,
        gate,
        keeps,
        *into.tensors,
        *back.tensors,
    )
    return output


class ExpertMLP(torch.autograd.Function):
    """Autograd function of `expert_mlp`, in autocast's dtype where it is on."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        index: torch.Tensor,
        settings: tuple[LinearSettings, LinearSettings],
        experts: int,
        gate: Gate,
        keeps: bool,
        *tensors: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the output; save the routing, the parameters, and the source of the input's rows."""
        dtype = activation_dtype(hidden)
        ctx.settings, ctx.gate, ctx.dtype, ctx.hidden_dtype = settings, gate, dtype, hidden.dtype
        routing = Routing.start(index, experts)
        wide = GroupedLinear.start(tensors[:_TENSORS], settings[0], routing.ends, dtype)
        rows = hidden.to(dtype)
        product = wide.multiply(routing.gather(rows), routing.sort(index))
        narrow = GroupedLinear.start(tensors[_TENSORS:], settings[1], routing.ends, dtype)
        out = routing.combine(narrow.multiply(gate.apply(product)), weights)
        if narrow.bias is not None:
            # A bias of each expert, times the weights, is a product with the weights by expert.
            out = torch.addmm(out, _by_expert(weights, index, experts, dtype), narrow.bias.to(dtype))
        needs_rows = not keeps or any(ctx.needs_input_grad[7 : 7 + _TENSORS])
        *source, ctx.scaling = rows_to_keep(hidden, rows, needs_it=needs_rows)
        ctx.save_for_backward(product if keeps else None, weights, index, *routing[:3], *source, *tensors)
        return out.to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of tokens, weights and parameters, by grouped products."""
        product, weights, index, order, places, ends, *inputs = ctx.saved_tensors
        source, tensors = inputs[:3], inputs[3:]
        routing = Routing(order, places, ends, index.size(1))
        of_wide, of_narrow = ctx.needs_input_grad[7 : 7 + _TENSORS], ctx.needs_input_grad[7 + _TENSORS :]
        wide = GroupedLinear.start(tensors[:_TENSORS], ctx.settings[0], ends, ctx.dtype)
        if product is None:
            again = rows_again(source, ctx.scaling, ctx.dtype)
            product = wide.multiply(routing.gather(again), routing.sort(index))
            del again
        narrow = GroupedLinear.start(tensors[_TENSORS:], ctx.settings[1], ends, ctx.dtype)
        output_grad = gradient.to(ctx.dtype)
        of_rows = routing.gather(output_grad)
        slopes = narrow.slopes(of_rows)
        between = narrow.input_gradient(of_rows, slopes)
        of_weights = routing.unsort(ctx.gate.backward(product, between, routing.sort(weights)))
        narrow_gradients = narrow.gradients(
            of_rows,
            slopes,
            between if any(of_narrow) else None,
            of_narrow,
            tensors[_TENSORS:],
        )
        # Both are large, and are not needed for the gradients of gate and up.
        del of_rows, between
        if narrow.bias is not None:
            by_expert = torch.mm(output_grad, narrow.bias.to(ctx.dtype).t())
            of_weights = of_weights + by_expert.gather(1, index)
            if of_narrow[1]:
                shares = _by_expert(weights, index, len(ends), ctx.dtype)
                narrow_gradients[1] = torch.mm(shares.t(), output_grad).to(narrow.bias.dtype)
        slopes = wide.slopes(product)
        wide_gradients: list[torch.Tensor | None] = [None] * _TENSORS
        if any(of_wide):
            rows = routing.gather(rows_again(source, ctx.scaling, ctx.dtype))
            wide_gradients = wide.gradients(product, slopes, rows, of_wide, tensors[:_TENSORS])
            del rows
        if wide.bias is not None and of_wide[1]:
            wide_gradients[1] = _bias_gradient(product, ends).to(wide.bias.dtype)
        of_hidden = None
        if ctx.needs_input_grad[0]:
            of_hidden = routing.combine(wide.input_gradient(product, slopes), None).to(ctx.hidden_dtype)
        settings = [None] * (len(ctx.needs_input_grad) - 2 - 2 * _TENSORS)
        return of_hidden, of_weights.to(weights.dtype), *settings, *wide_gradients, *narrow_gradients


def _by_expert(weights: torch.Tensor, index: torch.Tensor, experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights (T, k) as a matrix (T, E), with zeros for the other experts."""
    shares = torch.zeros((len(weights), experts), dtype=dtype, device=weights.device)
    return shares.scatter_(1, index, weights.to(dtype))


def _bias_gradient(of_product: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the sums (E, N) of the rows (S, N) of each expert."""
    # Eight columns of ones are the fewest that a grouped product of 16 bits takes.
    ones = of_product.new_ones((len(of_product), 8))
    sums: Sequence[torch.Tensor] = grouped_gradient(ones, of_product, ends).unbind(1)
    return sums[0]
