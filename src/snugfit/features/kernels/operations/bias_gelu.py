"""A bias and GELU in one kernel: y = gelu(x + bias), forward and backward, in its exact form and by tanh.

The backward pass needs the matrix product before the bias, which is in memory already. The gradient of the
bias is a by-product of the kernel that computes the product's gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from snugfit.features.kernels.operations.column_sums import add_partials, empty_partials
from snugfit.features.kernels.operations.operators import define, has_kernel

BLOCK_COLUMNS = 1024
"""Largest number of columns in one kernel program. With 512, the backward kernel took longer (dev/log.md)."""

BLOCK_ROWS = 2
"""Number of rows that a kernel program processes at a time (chosen)."""

bias_gelu_forward = define(
    "bias_gelu_forward(Tensor x, Tensor bias, bool by_tanh, *, Tensor(a!) y) -> ()", "bias_gelu"
)

bias_gelu_backward = define(
    "bias_gelu_backward(Tensor dy, Tensor x, Tensor bias, bool by_tanh, *, Tensor(a!) dx, "
    "Tensor(b!) partials) -> ()",
    "bias_gelu",
)


def bias_gelu(x: torch.Tensor, bias: torch.Tensor, *, by_tanh: bool = False) -> torch.Tensor:
    """Return GELU of `x` (..., H) plus `bias` (H), in the shape and dtype of `x`; `by_tanh` approximates
    it."""
    y: torch.Tensor = BiasGelu.apply(x, bias, by_tanh)  # type: ignore[no-untyped-call]
    return y


class BiasGelu(torch.autograd.Function):
    """Autograd function of `bias_gelu`: kernels on a GPU, plain torch elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor, by_tanh: bool) -> torch.Tensor:
        """Return the result, in the shape and dtype of `x`."""
        x = x.contiguous()
        ctx.save_for_backward(x, bias)
        ctx.by_tanh = by_tanh
        if not has_kernel(x):
            return forward_in_torch(x, bias, by_tanh)
        y = torch.empty_like(x)
        bias_gelu_forward(x, bias, by_tanh, y=y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        """Return the gradients of `x` and of the bias."""
        x, bias = ctx.saved_tensors
        dy = dy.contiguous()
        dbias: torch.Tensor | None
        if not has_kernel(x):
            dx, dbias = backward_in_torch(dy, x, bias, ctx.by_tanh)
        else:
            dx = torch.empty_like(x)
            partials = empty_partials(x, 1, BLOCK_ROWS)
            bias_gelu_backward(dy, x, bias, ctx.by_tanh, dx=dx, partials=partials)
            dbias = add_partials(partials, bias.dtype)[0] if ctx.needs_input_grad[1] else None
        return dx, dbias, None


# ---- plain torch -----------------------------------------------------------------------------------------


def forward_in_torch(x: torch.Tensor, bias: torch.Tensor, by_tanh: bool) -> torch.Tensor:
    """Return GELU of `x` (..., H) plus `bias` (H), computed in plain torch."""
    value = _sum(x, bias)
    return torch.nn.functional.gelu(value, approximate="tanh" if by_tanh else "none").to(x.dtype)


def backward_in_torch(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, by_tanh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `x` (..., H) and of `bias` (H), computed in plain torch."""
    leaf = _sum(x, bias).detach().requires_grad_()
    # The reference differentiates by torch's autograd.
    with torch.enable_grad():
        y = torch.nn.functional.gelu(leaf, approximate="tanh" if by_tanh else "none")
    (dx,) = torch.autograd.grad(y, leaf, dy.to(leaf.dtype))
    return dx.to(x.dtype), dx.flatten(0, -2).sum(0).to(bias.dtype)


def _sum(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide) + bias.to(wide)
