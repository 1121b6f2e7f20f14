"""Weights of experts in 4 bits, which bitsandbytes and transformers leave in 16.

transformers stores all experts of a layer in one parameter of three dimensions. bitsandbytes packs such a
parameter as it packs a linear layer, and a parametrization unpacks it at each access
(`replace_parameter_4bit`). The kernels of `fused` unpack it for each product instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


def is_of_experts(module: nn.Module, parameter: torch.Tensor | None) -> bool:
    """Return True if this parameter of a module has the weights of several experts."""
    return type(module).__name__.endswith("Experts") and parameter is not None and parameter.dim() == 3


def pack_experts(model: nn.Module, *, double: bool) -> None:
    """Replace the weights of a model's experts by numbers of 4 bits, one parameter after the other."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if is_of_experts(module, parameter):
                pack(module, name, double=double)


def pack(module: Any, name: str, *, double: bool) -> None:
    """Replace a parameter of a module by numbers of NF4; `double` quantizes their scales too."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    replace_parameter_4bit(module, name, compress_statistics=double, quant_type="nf4")
    packed = module.parametrizations[name]
    # A report and a checkpoint find the scales of a packed weight by these attributes.
    packed.original.quant_state, packed.original.quant_type = packed[0].quant_state, "nf4"


def has_packed_experts(module: nn.Module) -> bool:
    """Return True if a module has weights of experts in 4 bits."""
    return any(
        hasattr(packed.original, "quant_type") for packed in getattr(module, "parametrizations", {}).values()
    )
