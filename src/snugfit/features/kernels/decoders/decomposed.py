"""Linear layers with DoRA: a column of x W^T + s (x A^T) B^T is multiplied by m / n, and then gets its bias.

m is the trained magnitude, and n the norm of the same row of W + s B A, without a gradient. Source: Liu et
al., arXiv 2402.09353, sections 4.1 and 4.3. peft builds B A, as large as the weight. Here n follows from

    n^2 = |W|^2 + 2 s (W A^T) . B + s^2 (B A A^T) . B

where a norm and a product `.` are those of rows. A pass reads the weight, and makes no tensor of its size.
"""

from __future__ import annotations

from typing import Any

import torch

from snugfit.features.kernels.operations.column_sums import add_partials, empty_partials
from snugfit.features.kernels.operations.operators import (
    activation_dtype,
    autocast_device,
    define,
    has_kernel,
)
from snugfit.features.kernels.operations.projections import JointProduct, Layout, Projections
from snugfit.features.kernels.operations.rms_norm import rows_to_keep

BLOCK_ROWS = 4
"""Number of rows that a kernel program processes at a time (chosen)."""

_SCALE_COLUMNS = define(
    "scale_columns(Tensor product, Tensor factor, Tensor? bias, *, Tensor(a!) out) -> ()", "scaled_columns"
)
_SCALE_COLUMNS_BACKWARD = define(
    "scale_columns_backward(Tensor of_out, Tensor product, Tensor factor, *, Tensor(a!) of_product, "
    "Tensor(b!) partials) -> ()",
    "scaled_columns",
)


def decomposed_linear(
    x: torch.Tensor, layer: Projections, magnitude: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the result (..., N) of a linear layer with DoRA for `x` (..., H), in autocast's dtype where that
    is on.

    `layer` is one weight and its adapter, without a bias. Magnitude and bias are (N,).
    """
    result: torch.Tensor = DecomposedLinear.apply(  # type: ignore[no-untyped-call]
        x, layer.layout, magnitude, bias, *layer.tensors
    )
    return result


class DecomposedLinear(torch.autograd.Function):
    """Autograd function of `decomposed_linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        layout: Layout,
        magnitude: torch.Tensor,
        bias: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        """Return the result; save the product before its columns are scaled, and the tensors of a joint
        product.
        """
        rows = x.reshape(-1, x.size(-1)).to(activation_dtype(x))
        product, joint = JointProduct.start(rows, layout, tensors)
        _, _, (down, up) = layout.separate(tensors)
        with torch.autocast(autocast_device(x), enabled=False):
            norms = weight_norms(joint.matrix(rows.dtype), down, up, layout.spans[0].scale)
            factor = magnitude.to(norms.dtype) / norms
            out = scale_columns(product, factor, bias)
        *source, ctx.scaling = rows_to_keep(x, rows, needs_it=joint.needs_rows(ctx.needs_input_grad[4:]))
        ctx.save_for_backward(*source, product, factor, norms, *joint.tensors)
        ctx.x_dtype, ctx.joint, ctx.magnitude_dtype = x.dtype, joint.settings, magnitude.dtype
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, of_out: torch.Tensor) -> Any:
        """Return the gradients of `x`, the magnitude, the bias, the weight and the adapter."""
        source, (product, factor, norms, *saved) = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
        joint = JointProduct.restore(ctx.joint, saved)
        rows_of_out = of_out.reshape(product.shape).contiguous()
        of_product, sums = scale_columns_backward(rows_of_out, product, factor)
        needs_x, _, _, needs_bias, *needed = ctx.needs_input_grad
        of_x, of_tensors = joint.backward(of_product, source, ctx.scaling, needs_x, needed)
        if of_x is not None:
            of_x = of_x.view(*of_out.shape[:-1], -1).to(ctx.x_dtype)
        of_bias = rows_of_out.sum(0) if needs_bias else None
        return of_x, None, (sums / norms).to(ctx.magnitude_dtype), of_bias, *of_tensors


def weight_norms(weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the norms (N,) of the rows of W + s B A, in 32 bits at least.

    `weight` is W (N, H), `down` is A (r, H), and `up` is B (N, r). A is rounded to the dtype of W for the
    product of both.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    down, up = down.detach(), up.detach().to(wide) * scale
    if has_kernel(weight):
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square_()
    else:
        squares = weight.to(wide).square().sum(1)
    cross = torch.mm(weight, down.to(weight.dtype).t()).to(wide)
    gram = torch.mm(down.to(wide), down.to(wide).t())
    # 2 s (W A^T) . B + s^2 (B A A^T) . B, with the scale within `up`
    squares += ((2 * cross + torch.mm(up, gram)) * up).sum(1)
    norms: torch.Tensor = squares.sqrt_()
    return norms


# ---- the kernels ----------------------------------------------------------------------------------------


def scale_columns(product: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return product (T, N) times factor (N,) plus bias (N,), in the dtype of the product."""
    if has_kernel(product):
        out = torch.empty_like(product)
        _SCALE_COLUMNS(product, factor, bias, out=out)
        return out
    out = product * factor
    return (out if bias is None else out + bias).to(product.dtype)


def scale_columns_backward(
    of_out: torch.Tensor, product: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the product (T, N) and, in 32 bits at least, of the factor (N,)."""
    if not has_kernel(product):
        return (of_out * factor).to(product.dtype), (of_out.to(factor.dtype) * product).sum(0)
    of_product, partials = torch.empty_like(product), empty_partials(product, 1, BLOCK_ROWS)
    _SCALE_COLUMNS_BACKWARD(of_out, product, factor, of_product=of_product, partials=partials)
    return of_product, add_partials(partials, factor.dtype)[0]
