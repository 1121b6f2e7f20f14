"""Gated activations of experts, and their backward pass with the weight of each row.

A row's output is w down(a) with a = act(gate) * up. Let g be the gradient of down(a), times the weight of
down. Then the gradient of w is the dot product of g and a, and that of a is w g. So the output of down is not
saved (SonicMoE: Guo et al., arXiv 2512.14080, section 3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from snugfit.features.kernels.operations.operators import define, has_kernel

SILU, TANH, CLAMPED = range(3)
"""Kinds of activations: SiLU, GELU's approximation by tanh, and gpt-oss's clamped SiLU of interleaved
columns.
"""

_GATE_EXPERTS = define(
    "gate_experts(Tensor product, int kind, float alpha, float limit, *, Tensor(a!) out) -> ()", "experts"
)
_GATE_EXPERTS_BACKWARD = define(
    "gate_experts_backward(Tensor(a!) product, Tensor(b!) of_out, Tensor weights, int kind, float alpha, "
    "float limit, *, Tensor(c!) of_weights) -> ()",
    "experts",
)


class Gate(NamedTuple):
    """A gated activation of rows (S, 2 * I) with gate and up."""

    kind: int
    alpha: float = 1.0
    limit: float = 0.0
    """Bound of gate and up in a clamped activation."""

    def apply(self, product: torch.Tensor) -> torch.Tensor:
        """Return act(gate) * up (S, I)."""
        if not has_kernel(product):
            return self.reference(product)
        out = product.new_empty((len(product), product.size(1) // 2))
        _GATE_EXPERTS(product, *self, out=out)
        return out

    def backward(self, product: torch.Tensor, of_out: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the gradient (S,) of the rows' weights (S,), in 32 bits or more.

        Overwrite the product (S, 2 * I) with its gradient, and `of_out` (S, I) with w act(gate) * up.
        `of_out` is the gradient of the output without the weights.
        """
        wide = torch.promote_types(product.dtype, torch.float32)
        if has_kernel(product):
            of_weights = product.new_empty(len(product), dtype=wide)
            _GATE_EXPERTS_BACKWARD(product, of_out, weights, *self, of_weights=of_weights)
        else:
            of_weights = self._reference_backward(product, of_out, weights.to(wide)[:, None])
        # The saved product has changed, so autograd must refuse a second backward pass.
        torch.autograd.graph.increment_version(product)
        return of_weights

    def reference(self, product: torch.Tensor) -> torch.Tensor:
        """Return act(gate) * up (S, I), in plain torch."""
        gate, up = self._parts(product)
        if self.kind == CLAMPED:
            # Five operators with a rounding each would add an error that the kernel does not have.
            wide = torch.promote_types(product.dtype, torch.float32)
            gate, up = gate.to(wide).clamp(max=self.limit), up.to(wide).clamp(-self.limit, self.limit)
            return ((up + 1) * gate * torch.sigmoid(gate * self.alpha)).to(product.dtype)
        act = functional.gelu(gate, approximate="tanh") if self.kind == TANH else functional.silu(gate)
        return act * up

    def _parts(self, product: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kind == CLAMPED:
            return product[:, ::2], product[:, 1::2]
        gate, up = product.chunk(2, dim=1)
        return gate, up

    def _reference_backward(
        self, product: torch.Tensor, of_out: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        with torch.enable_grad():
            leaf = product.detach().to(weights.dtype).clone().requires_grad_()
            out = self.reference(leaf)
        slope = of_out.to(weights.dtype)
        (gradient,) = torch.autograd.grad(out, leaf, slope * weights)
        product.copy_(gradient)
        of_weights = (slope * out.detach()).sum(1)
        of_out.copy_(out.detach() * weights)
        return of_weights
