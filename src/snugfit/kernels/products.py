"""Products within our operations: of weights that lie side by side, and of gradients of weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from snugfit.kernels.joint_linear import joint_view
from snugfit.kernels.operators import has_kernel

NARROW = (torch.bfloat16, torch.float16)


def join_weights(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """All of them as one, along the first dimension, in this dtype: a view where they lie side by side and
    have it."""
    view = joint_view(tensors)
    return (torch.cat([one.detach() for one in tensors]) if view is None else view).to(dtype)


def weight_gradient(of_product: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of a product rows (T, K) @ weight (N, K).T, the gradient of the weight in its own dtype. A GPU's
    product of 16 bits writes its sums in 32 where that is the weight's dtype, and no cast follows."""
    if dtype is torch.float32 and rows.dtype in NARROW and has_kernel(rows):
        return torch.mm(of_product.t(), rows, out_dtype=dtype)
    return torch.mm(of_product.t(), rows).to(dtype)
