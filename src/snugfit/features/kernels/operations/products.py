"""Matrix products within snugfit's operations: gradients of weights, and a check for results that are
reused.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from snugfit.features.kernels.operations.operators import has_kernel

NARROW = (torch.bfloat16, torch.float16)

_CACHING_MODES = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
"""Class names of the modes in which selective checkpointing stores and reuses results of operators."""


def results_are_kept() -> bool:
    """Return True if selective checkpointing may reuse the result of a matrix product, so that it must not be
    overwritten.

    That is so while one of its modes is on, for the forward pass or for the recomputation.
    """
    modes = _get_current_dispatch_mode_stack()
    return any(type(mode).__name__ in _CACHING_MODES for mode in modes)


def weight_gradient(of_product: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the gradient (N, K) of the weight in rows (T, K) @ weight.T, in the weight's dtype.

    `of_product` is the incoming gradient (T, N).

    If the weight's dtype has 32 bits, a GPU's product of 16 bits writes its sums in 32, and no cast follows.
    """
    # A 16-bit product is summed in fp32 anyway, so that no rounding or cast is needed after it.
    if dtype is torch.float32 and rows.dtype in NARROW and has_kernel(rows):
        return torch.mm(of_product.t(), rows, out_dtype=dtype)
    return torch.mm(of_product.t(), rows).to(dtype)
