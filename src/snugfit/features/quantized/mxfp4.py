"""Weights of experts in MXFP4, as gpt-oss stores them: random ones, and those of its files.

transformers (5.23) trains such a model only in 16 bits. Here the packed weights stay, and the kernels of
`fused` unpack them for each product.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import parametrize

from snugfit.features.kernels.operations.mxfp4 import BIAS, BLOCK, VALUES, Mxfp4Weight
from snugfit.features.quantized.fields import MXFP4

if TYPE_CHECKING:
    from torch import nn

_MEAN_SQUARE = sum(value**2 for value in VALUES) / len(VALUES)


def store_packed(module: Any, name: str, packed: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> None:
    """Replace a parameter (E, K, N) of a module by blocks (E, N, K / 32, 16) and scales (E, N, K / 32) of
    MXFP4, which are unpacked to this dtype.
    """
    blocks, scales = packed
    module._parameters[name] = torch.nn.Parameter(blocks, requires_grad=False)
    parametrize.register_parametrization(module, name, Mxfp4Weight(scales, dtype), unsafe=True)
    # A report and `has_packed_experts` find packed weights by this attribute.
    module.parametrizations[name].original.quant_type = MXFP4


def random_blocks(
    parameter: nn.Parameter, device: torch.device, spread: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random blocks and scales for a parameter (E, K, N), with about this standard deviation."""
    experts, inputs, outputs = parameter.shape
    sizes = experts, outputs, inputs // BLOCK
    blocks = torch.empty((*sizes, BLOCK // 2), dtype=torch.uint8, device=device).random_()
    exponent = round(math.log2(spread / math.sqrt(_MEAN_SQUARE)))
    return blocks, torch.full(sizes, BIAS + exponent, dtype=torch.uint8, device=device)
