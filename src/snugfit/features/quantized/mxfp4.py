"""Weights of experts in MXFP4, as gpt-oss stores them: random ones, and those of its files.

transformers (5.23) trains such a model only in 16 bits. Here the packed weights stay, and the kernels of
`fused` unpack them for each product.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import parametrize

from snugfit.features.kernels.decoders.experts.mxfp4 import BIAS, BLOCK, VALUES, Mxfp4Weight
from snugfit.features.quantized.fields import MXFP4
from snugfit.features.quantized.packed_experts import is_of_experts

if TYPE_CHECKING:
    from torch import nn

_MEAN_SQUARE = sum(value**2 for value in VALUES) / len(VALUES)


def store_packed(
    module: Any, name: str, packed: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> None:
    """Replace a parameter (E, K, N) of a module by blocks and scales of MXFP4, which unpack to this dtype.

    Blocks are (E, N, K / 32, 16), and scales (E, N, K / 32).
    """
    blocks, scales = packed
    module._parameters[name] = torch.nn.Parameter(blocks, requires_grad=False)
    parametrize.register_parametrization(module, name, Mxfp4Weight(scales, dtype), unsafe=True)
    # A report and `has_packed_experts` find packed weights by this attribute.
    module.parametrizations[name].original.quant_type = MXFP4


def empty_blocks(parameter: nn.Parameter, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks and scales without values for a parameter (E, K, N)."""
    experts, inputs, outputs = parameter.shape
    scales = torch.empty((experts, outputs, inputs // BLOCK), dtype=torch.uint8, device=device)
    return scales.new_empty((*scales.shape, BLOCK // 2)), scales


def random_blocks(
    parameter: nn.Parameter, device: torch.device, spread: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random blocks and scales for a parameter (E, K, N), with about this standard deviation."""
    blocks, scales = empty_blocks(parameter, device)
    exponent = round(math.log2(spread / math.sqrt(_MEAN_SQUARE)))
    return blocks.random_(), scales.fill_(BIAS + exponent)


FILE_NAMES = {
    rf"experts\.{name}_{part}$": f"experts.parametrizations.{name}.{attribute}"
    for name in ("gate_up_proj", "down_proj")
    for part, attribute in (("blocks", "original"), ("scales", "0.scales"))
}
"""Patterns of the names in gpt-oss's files, with the names of the same tensors in a model."""

_METHOD = "bitsandbytes_4bit_with_mxfp4"


def loading_arguments(config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that read blocks and scales as they are, and quantize linear
    layers by this `BitsAndBytesConfig`.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantizer
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
    from transformers.utils.quantization_config import QuantizationMethod

    class PackedExpertsQuantizer(Bnb4BitHfQuantizer):  # type: ignore[misc]
        def _process_model_before_weight_loading(self, model: Any, *arguments: Any, **keywords: Any) -> None:
            super()._process_model_before_weight_loading(model, *arguments, **keywords)
            for module in list(model.modules()):
                for name, parameter in list(module.named_parameters(recurse=False)):
                    if is_of_experts(module, parameter):
                        store_packed(module, name, empty_blocks(parameter, torch.device("meta")), dtype)

        def _process_model_after_weight_loading(self, model: Any, **keywords: Any) -> Any:
            # Other libraries know a model with layers of bitsandbytes by this value.
            self.quantization_config.quant_method = QuantizationMethod.BITS_AND_BYTES
            model.quantization_method = QuantizationMethod.BITS_AND_BYTES
            return super()._process_model_after_weight_loading(model, **keywords)

    # The class has the dtype of this model, so it replaces that of an earlier one.
    AUTO_QUANTIZER_MAPPING.pop(_METHOD, None)
    register_quantizer(_METHOD)(PackedExpertsQuantizer)
    config.quant_method = _METHOD
    return {"quantization_config": config, "key_mapping": FILE_NAMES}
