"""The MLP of a decoder, down(act(gate(x)) * up(x)), which saves at most the product of gate and up.

The product of gate and up is the largest saved tensor of a decoder's layer, and one matrix product recomputes
it. A module with `RECOMPUTES` set does so. This frees more bytes per second of recomputation than recomputing
whole layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from snugfit.features.kernels.operations.operators import activation_dtype, define, has_kernel
from snugfit.features.kernels.operations.projections import JointProduct, Layout, Projections
from snugfit.features.kernels.operations.rms_norm import rows_again, rows_to_keep

RECOMPUTES = "recomputes_gate_and_up"
"""Name of a module's attribute; True makes it recompute the product of gate and up in the backward pass."""

_GATE = define("gate(Tensor product, bool tanh, *, Tensor(a!) out) -> ()", "gated")
_GATE_BACKWARD = define(
    "gate_backward(Tensor(a!) product, Tensor(b!) of_out, bool tanh, bool again) -> ()", "gated"
)


def gated_mlp(
    hidden: torch.Tensor, into: Projections, back: Projections, *, tanh: bool, keeps: bool = True
) -> torch.Tensor:
    """Return the MLP's output (..., H) for hidden states (..., H).

    `into` has the weights of gate and up (I, H) each, and `back` the weight of down (H, I), all without a
    bias. The activation is SiLU, or with `tanh` GELU's approximation. `keeps` saves the product of gate and
    up for the backward pass; otherwise it is recomputed there.
    """
    output: torch.Tensor = GatedMLP.apply(  # type: ignore[no-untyped-call]
        hidden, into.layout, back.layout, tanh, keeps, *into.tensors, *back.tensors
    )
    return output


class GatedMLP(torch.autograd.Function):
    """Autograd function of `gated_mlp`, in autocast's dtype where it is on."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        into: Layout,
        back: Layout,
        tanh: bool,
        keeps: bool,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        """Return the output; save the weights, and tensors from which the normed input is recomputed.

        With `keeps`, save the product of gate and up too.
        """
        rows = hidden.reshape(-1, hidden.size(-1)).to(activation_dtype(hidden))
        # Gate and up are one product (T, 2 * I).
        product, wide = JointProduct.start(rows, into, tensors[: into.tensor_count])
        out, narrow = JointProduct.start(activate(product, tanh), back, tensors[into.tensor_count :])
        # The input is needed for gradients of weights, or for computing the product again.
        needs_rows = not keeps or wide.needs_rows(ctx.needs_input_grad[5 : 5 + into.tensor_count])
        *source, ctx.scaling = rows_to_keep(hidden, rows, needs_it=needs_rows)
        ctx.save_for_backward(product if keeps else None, *source, *wide.tensors, *narrow.tensors)
        ctx.tanh, ctx.hidden_dtype, ctx.dtype = tanh, hidden.dtype, rows.dtype
        ctx.wide, ctx.narrow, ctx.count = wide.settings, narrow.settings, len(wide.tensors)
        return out.view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of input and weights: matrix products, and one kernel for the activation.

        Recompute the product of gate and up first if it was not saved.
        """
        product, *saved = ctx.saved_tensors
        source, matrices = saved[:3], saved[3:]
        wide = JointProduct.restore(ctx.wide, matrices[: ctx.count])
        narrow = JointProduct.restore(ctx.narrow, matrices[ctx.count :])
        needs_wide = ctx.needs_input_grad[5 : 5 + wide.layout.tensor_count]
        needs_narrow = ctx.needs_input_grad[5 + wide.layout.tensor_count :]
        rows = None
        if product is None:
            rows = rows_again(source, ctx.scaling, ctx.dtype)
            product = wide.multiply(rows)
        output_grad = gradient.reshape(-1, gradient.size(-1)).to(product.dtype)
        slopes = narrow.slopes(output_grad)
        between = narrow.input_gradient(output_grad, slopes)
        # The kernel overwrites the product with the gradients of gate and up. It overwrites `between` with
        # their output, the third product's input, which was not saved.
        activate_backward(product, between, ctx.tanh, again=narrow.needs_rows(needs_narrow))
        of_narrow = narrow.gradients(output_grad, slopes, [between].pop, needs_narrow)
        # `between` is large, and is not needed for the gradients of gate and up.
        del between
        slopes = wide.slopes(product)
        of_wide = wide.gradients(
            product,
            slopes,
            lambda: rows_again(source, ctx.scaling, product.dtype) if rows is None else rows,
            needs_wide,
        )
        of_hidden = None
        if ctx.needs_input_grad[0]:
            of_hidden = wide.input_gradient(product, slopes).view(*gradient.shape[:-1], -1)
            of_hidden = of_hidden.to(ctx.hidden_dtype)
        return of_hidden, None, None, None, None, *of_wide, *of_narrow


# ---- the kernels ----------------------------------------------------------------------------------------


def activate(product: torch.Tensor, tanh: bool) -> torch.Tensor:
    """Return act(gate) * up of rows (T, 2 * I) of gate and up."""
    if not has_kernel(product):
        return reference(product, tanh)
    out = product.new_empty((len(product), product.size(1) // 2))
    _GATE(product, tanh, out=out)
    return out


def activate_backward(product: torch.Tensor, output_grad: torch.Tensor, tanh: bool, *, again: bool) -> None:
    """Overwrite the product of gate and up (`rows`) with its own gradient.

    `output_grad` is the gradient (T, I) of `activate`'s output. With `again`, that output overwrites it.
    """
    if has_kernel(product):
        _GATE_BACKWARD(product, output_grad, tanh, again)
    else:
        reference_backward(product, output_grad, tanh, again)
    # The saved product has changed, so autograd must refuse a second backward pass.
    torch.autograd.graph.increment_version(product)


def reference(product: torch.Tensor, tanh: bool) -> torch.Tensor:
    """Return act(gate) * up (T, I) of a product (T, 2 * I), in plain torch."""
    gate, up = product.chunk(2, dim=1)
    return _act(gate, tanh) * up


def reference_backward(product: torch.Tensor, output_grad: torch.Tensor, tanh: bool, again: bool) -> None:
    """Overwrite the product of gate and up with its gradient, in plain torch (`activate_backward`)."""
    wide = torch.promote_types(product.dtype, torch.float32)
    # Both halves are views, so that writing them overwrites the product.
    gates, ups = product.chunk(2, dim=1)
    gate, up, slope = (tensor.to(wide) for tensor in (gates, ups, output_grad))
    with torch.enable_grad():
        leaf = gate.detach().requires_grad_()
        value = _act(leaf, tanh)
    (of_gate,) = torch.autograd.grad(value, leaf, slope * up)
    of_up = slope * value.detach()
    if again:
        output_grad.copy_(_act(gates, tanh) * ups)
    gates.copy_(of_gate)
    ups.copy_(of_up)


def _act(gate: torch.Tensor, tanh: bool) -> torch.Tensor:
    return functional.gelu(gate, approximate="tanh") if tanh else functional.silu(gate)
