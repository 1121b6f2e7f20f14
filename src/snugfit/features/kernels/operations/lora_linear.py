"""A linear layer with a low-rank adapter, or several of one input, with no gradient of frozen weights.

The forward pass saves x, or tensors from which a norm computes it again, and S = x A^T with r columns for
each adapter.
"""

from __future__ import annotations

from typing import Any

import torch

from snugfit.features.kernels.operations.operators import activation_dtype
from snugfit.features.kernels.operations.projections import JointProduct, Layout, Projections
from snugfit.features.kernels.operations.rms_norm import rows_again, rows_to_keep


def lora_linear(x: torch.Tensor, projections: Projections) -> tuple[torch.Tensor, ...]:
    """Return the results (..., N) of linear layers for one `x` (..., H), in autocast's dtype where that is
    on.

    They are views of one tensor, so the rows of several results are strided.
    """
    results: tuple[torch.Tensor, ...] = LoraLinear.apply(  # type: ignore[no-untyped-call]
        x, projections.layout, *projections.tensors
    )
    return results


class LoraLinear(torch.autograd.Function):
    """Autograd function of `lora_linear`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: Layout, *tensors: torch.Tensor) -> Any:
        """Return the results; save the input's rows or their source, and the adapters' S."""
        rows = x.reshape(-1, x.size(-1)).to(activation_dtype(x))
        product, joint = JointProduct.start(rows, layout, tensors)
        *source, ctx.from_one = rows_to_keep(x, rows, needs_it=joint.needs_rows(ctx.needs_input_grad[2:]))
        ctx.save_for_backward(*source, *joint.tensors)
        ctx.x_dtype, ctx.joint = x.dtype, joint.settings
        return product.view(*x.shape[:-1], -1).split(layout.sizes, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradients of `x`, weights, biases and adapters."""
        # A checkpoint unpacks saved tensors once.
        saved = ctx.saved_tensors
        source, joint = saved[:3], JointProduct.restore(ctx.joint, saved[3:])
        joined = gradients[0] if len(gradients) == 1 else torch.cat(gradients, -1)
        of_product = joined.reshape(-1, joined.size(-1))
        slopes = joint.slopes(of_product)
        of_tensors = joint.gradients(
            of_product,
            slopes,
            lambda: rows_again(source, ctx.from_one, of_product.dtype),
            ctx.needs_input_grad[2:],
        )
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = joint.input_gradient(of_product, slopes).view(*joined.shape[:-1], -1).to(ctx.x_dtype)
        return of_x, None, *of_tensors
