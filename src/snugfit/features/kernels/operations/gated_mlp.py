"""The MLP of a decoder, down(act(gate(x)) * up(x)), which saves at most the product of gate and up.

The product of gate and up is the largest saved tensor of a decoder's layer, and one matrix product recomputes
it. A module with `RECOMPUTES` set does so. This frees more bytes per second of recomputation than recomputing
whole layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from snugfit.features.kernels.operations.joint_linear import join_weights
from snugfit.features.kernels.operations.operators import activation_dtype, define, has_kernel
from snugfit.features.kernels.operations.products import weight_gradient
from snugfit.features.kernels.operations.rms_norm import rows_again, rows_to_keep

RECOMPUTES = "recomputes_gate_and_up"
"""Name of the attribute that makes a module recompute its product of gate and up."""

_GATE = define("gate(Tensor product, bool tanh, *, Tensor(a!) out) -> ()", "gated")
_GATE_BACKWARD = define(
    "gate_backward(Tensor(a!) product, Tensor(b!) of_out, bool tanh, bool again) -> ()", "gated"
)


def gated_mlp(
    hidden: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    tanh: bool,
    keeps: bool = True,
) -> torch.Tensor:
    """Return the MLP's output (..., H) for hidden states (..., H) and weights (I, H), (I, H) and (H, I).

    The activation is SiLU, or with `tanh` GELU's approximation. `keeps` saves the product of gate and up for
    the backward pass; otherwise it is recomputed there.
    """
    given: torch.Tensor = GatedMLP.apply(  # type: ignore[no-untyped-call]
        hidden, gate, up, down, tanh, keeps
    )
    return given


class GatedMLP(torch.autograd.Function):
    """Autograd function of `gated_mlp`, in autocast's dtype where it is on."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        tanh: bool,
        keeps: bool,
    ) -> torch.Tensor:
        """Return the output; save the weights, and tensors from which the normed input is recomputed.

        With `keeps`, save the product of gate and up too.
        """
        dtype = activation_dtype(hidden)
        rows = hidden.reshape(-1, hidden.size(-1)).to(dtype)
        # Gate and up are one product (T, 2 * I).
        wide, narrow = join_weights((gate, up), dtype), down.detach().to(dtype)
        product = torch.mm(rows, wide.t())
        out = torch.mm(activate(product, tanh), narrow.t())
        # The input is needed for weights, or to compute the product again.
        needs_rows = not keeps or any(ctx.needs_input_grad[1:3])
        *source, ctx.from_one = rows_to_keep(hidden, rows, needs_it=needs_rows)
        ctx.save_for_backward(product if keeps else None, wide, narrow, *source)
        ctx.tanh, ctx.hidden_dtype, ctx.weight_dtypes = tanh, hidden.dtype, (gate.dtype, down.dtype)
        return out.view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of input and weights: matrix products, and one kernel for the activation.

        Recompute the product of gate and up first if it was not saved.
        """
        product, wide, narrow, *source = ctx.saved_tensors
        needs_hidden, needs_gate, needs_up, needs_down = ctx.needs_input_grad[:4]
        rows = None
        if product is None:
            rows = rows_again(source, ctx.from_one, wide.dtype)
            product = torch.mm(rows, wide.t())
        of_out = gradient.reshape(-1, gradient.size(-1)).to(product.dtype)
        between = torch.mm(of_out, narrow)
        # The kernel overwrites the product with the gradients of gate and up, and `between` with their
        # output.
        activate_backward(product, between, ctx.tanh, again=needs_down)
        of_down = of_gate = of_up = of_hidden = None
        if needs_down:
            # The third product's input is computed again by the kernel, and was not saved.
            of_down = weight_gradient(of_out, between, ctx.weight_dtypes[1])
        # `between` is large, and the gradients of gate and up do not need it.
        del between
        if needs_gate or needs_up:
            rows = rows_again(source, ctx.from_one, product.dtype) if rows is None else rows
            # One product gives the gradients of both weights.
            of_gate, of_up = weight_gradient(product, rows, ctx.weight_dtypes[0]).chunk(2)
        if needs_hidden:
            of_hidden = torch.mm(product, wide).view(*gradient.shape[:-1], -1).to(ctx.hidden_dtype)
        of_both = of_gate if needs_gate else None, of_up if needs_up else None
        return of_hidden, *of_both, of_down, None, None


# ---- the kernels ----------------------------------------------------------------------------------------


def activate(product: torch.Tensor, tanh: bool) -> torch.Tensor:
    """Return act(gate) * up of rows (T, 2 * I) of gate and up."""
    if not has_kernel(product):
        return reference(product, tanh)
    out = product.new_empty((len(product), product.size(1) // 2))
    _GATE(product, tanh, out=out)
    return out


def activate_backward(product: torch.Tensor, of_out: torch.Tensor, tanh: bool, *, again: bool) -> None:
    """Overwrite the product of gate and up (`rows`) with its own gradient.

    `of_out` is the gradient (T, I) of `activate`'s output. With `again`, that output overwrites it.
    """
    if has_kernel(product):
        _GATE_BACKWARD(product, of_out, tanh, again)
    else:
        reference_backward(product, of_out, tanh, again)
    # The saved product has changed, so autograd refuses a second backward pass instead of a wrong one.
    torch.autograd.graph.increment_version(product)


def reference(product: torch.Tensor, tanh: bool) -> torch.Tensor:
    """Return act(gate) * up (T, I) of a product (T, 2 * I), in plain torch."""
    gate, up = product.chunk(2, dim=1)
    return _act(gate, tanh) * up


def reference_backward(product: torch.Tensor, of_out: torch.Tensor, tanh: bool, again: bool) -> None:
    """Overwrite the product of gate and up with its gradient, in plain torch (`activate_backward`)."""
    wide = torch.promote_types(product.dtype, torch.float32)
    # The halves are views, so writing them overwrites the product.
    gates, ups = product.chunk(2, dim=1)
    gate, up, slope = (one.to(wide) for one in (gates, ups, of_out))
    with torch.enable_grad():
        leaf = gate.detach().requires_grad_()
        value = _act(leaf, tanh)
    (of_gate,) = torch.autograd.grad(value, leaf, slope * up)
    of_up = slope * value.detach()
    if again:
        of_out.copy_(_act(gates, tanh) * ups)
    gates.copy_(of_gate)
    ups.copy_(of_up)


def _act(gate: torch.Tensor, tanh: bool) -> torch.Tensor:
    return functional.gelu(gate, approximate="tanh") if tanh else functional.silu(gate)
