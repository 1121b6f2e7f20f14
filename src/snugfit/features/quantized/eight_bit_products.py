"""Simulation of matrix products with bitsandbytes' 8-bit weights on a GPU (LLM.int8(), arXiv 2208.07339).

bitsandbytes quantizes the inputs of each product in float16 and multiplies integers. The result is rescaled
in float16 and cast to the dtype of the inputs. The backward pass dequantizes the whole weight. The autograd
graph keeps the inputs itself, so activation checkpointing does not free them. `MatMul8bitLt` chooses outlier
columns by values, which tensors on `meta` do not have. Outlier columns are few, and the simulation has none.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from snugfit.rehearsal.device.policy import CudaPolicy

if TYPE_CHECKING:
    from snugfit.rehearsal.device.policy import Policy


@contextlib.contextmanager
def eight_bit_products(policy: Policy) -> Iterator[None]:
    """Context in which products with 8-bit weights run on `meta` tensors as on the simulated GPU.

    If bitsandbytes is not imported, the context has no effect.
    """
    if "bitsandbytes" not in sys.modules:
        yield
        return
    from unittest.mock import patch

    from bitsandbytes.autograd import _functions

    log = logging.getLogger(_functions.__name__)  # every product would log a warning about a cast
    own = _product_of(_functions) if isinstance(policy, CudaPolicy) else _functions.MatMul8bitFp
    with patch.object(_functions, "MatMul8bitLt", own), patch.object(log, "disabled", True):
        yield


def _product_of(functions: Any) -> Any:
    """Return a subclass of bitsandbytes' autograd function for products, whose forward pass runs on `meta`
    tensors.
    """
    import torch

    ops: Any = torch.ops.bitsandbytes

    class Product(functions.MatMul8bitLt):  # type: ignore[misc]
        """Subclass of bitsandbytes' autograd function for a matrix product, for inputs without outlier
        columns.
        """

        @staticmethod
        def forward(ctx: Any, A: Any, B: Any, out: Any = None, bias: Any = None, state: Any = None) -> Any:
            """Return the product on `meta` tensors, after allocating the temporary tensors of the GPU
            kernels.
            """
            shape = A.shape
            if len(shape) == 3:
                A = A.reshape(-1, shape[-1])
            half = A.to(torch.float16)
            quantized, _scales, _ = ops.int8_vectorwise_quant.default(half, 0.0)
            (half.abs() >= state.threshold).any()
            del half
            columns, outliers = (A.new_empty(0, dtype=dtype) for dtype in (torch.int64, A.dtype))
            sums = ops.int8_linear_matmul.default(quantized, state.CB)
            product = torch.empty_like(sums, dtype=torch.float16)
            if bias is not None and bias.dtype != torch.float16:
                product.add_(bias)
            result = product.to(A.dtype)
            ctx.is_empty, ctx.state = False, state
            ctx.grad_shape, ctx.dtype_A = shape, A.dtype
            ctx.dtype_bias = None if bias is None else bias.dtype
            keeps = any(ctx.needs_input_grad[:2])
            ctx.tensors = (None, outliers, A) if keeps else (None, None, None)
            ctx.tensor_states = (None, columns) if keeps else (None, None)
            return result.reshape(*shape[:-1], result.shape[-1])

    return Product
