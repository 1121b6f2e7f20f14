"""Frozen weights in 4 bits, unpacked by bitsandbytes' own kernels into one matrix for a joint product.

The values are those of its `dequantize_4bit`, bit for bit, in the dtype of the product. The matrix is freed
after the product, so at most one exists at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from snugfit.features.kernels.operations.operators import has_kernel


def unpack(packed: Sequence[torch.Tensor], states: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    """Return weights (N, H) of this dtype, below each other, from bitsandbytes' `Params4bit` and the
    `QuantState` of each.
    """
    operators: Any = torch.ops.bitsandbytes
    columns = states[0].shape[1]
    joint = packed[0].new_empty((sum(state.shape[0] for state in states), columns), dtype=dtype)
    parts = joint.split([state.shape[0] for state in states])
    for weight, state, part in zip(packed, states, parts, strict=True):
        settings = state.blocksize, state.quant_type, state.shape, dtype
        if has_kernel(joint):
            operators.dequantize_4bit.out(weight.detach(), _scales(state), *settings, out=part)
        else:
            # On the CPU, bitsandbytes has no operator that writes into a given tensor.
            part.copy_(operators.dequantize_4bit.default(weight.detach(), _scales(state), *settings))
    return joint


def unpack_whole(packed: torch.Tensor, state: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight of any shape in this dtype, from its packed values and their `QuantState`."""
    operators: Any = torch.ops.bitsandbytes
    settings = state.blocksize, state.quant_type, state.shape, dtype
    if not has_kernel(packed):
        return operators.dequantize_4bit.default(packed, _scales(state), *settings)  # type: ignore[no-any-return]
    whole = packed.new_empty(tuple(state.shape), dtype=dtype)
    operators.dequantize_4bit.out(packed, _scales(state), *settings, out=whole)
    return whole


def _scales(state: Any) -> torch.Tensor:
    """Return the scale of each block in fp32; scales in 8 bits are widened first."""
    if not state.nested:
        return state.absmax  # type: ignore[no-any-return]
    nested, operators = state.state2, torch.ops.bitsandbytes
    scales: torch.Tensor = operators.dequantize_blockwise.default(
        state.absmax, nested.absmax, nested.code, nested.blocksize, nested.dtype
    )
    # The offset is added by a separate kernel, as by bitsandbytes, with two roundings.
    return scales.add_(state.offset).float()
