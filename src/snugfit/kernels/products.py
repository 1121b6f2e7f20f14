"""What products within our operations compute in, and how a weight's gradient is made."""

from __future__ import annotations

import torch

from snugfit.kernels.operators import has_kernel

NARROW = (torch.bfloat16, torch.float16)


def product_dtype(tensor: torch.Tensor) -> torch.dtype:
    """What autocast multiplies in, where it is on; else what the tensor is in. A rehearsal's autocast uses
    the CPU's switch."""
    switch = "cpu" if tensor.is_meta else tensor.device.type
    return torch.get_autocast_dtype(switch) if torch.is_autocast_enabled(switch) else tensor.dtype


def weight_gradient(of_product: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of a product rows (T, K) @ weight (N, K).T, the gradient of the weight in its own dtype. A GPU's
    product of 16 bits writes its sums in 32 where that is the weight's dtype, and no cast follows."""
    if dtype is torch.float32 and rows.dtype in NARROW and has_kernel(rows):
        return torch.mm(of_product.t(), rows, out_dtype=dtype)
    return torch.mm(of_product.t(), rows).to(dtype)
