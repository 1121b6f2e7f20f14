"""Linear layers of a model as `Projections`: torch's own, and those to which peft added a LoRA adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from snugfit.features.kernels.operations.joint_linear import is_plain
from snugfit.features.kernels.operations.low_rank import Adapter
from snugfit.features.kernels.operations.projections import Projections

_LORA = "peft.tuners.lora.layer", "Linear"
"""Module and name of peft's class of a linear layer with LoRA adapters."""


VARIANTS = {"DoraLinearVariant": "DoRA"}
"""Names of variants of LoRA by their classes in peft."""


def projections_of(layers: Sequence[Any], *, biased: bool | None = None) -> Projections | None:
    """Return the weights, biases and adapters of linear layers with one input.

    None if one of them is not torch's own layer or has unsupported adapters. None too if only some have a
    bias, or if the answer differs from `biased`.
    """
    if not all(is_plain(layer) or unsupported(layer) == "" for layer in layers):
        return None
    bases = [_base(layer) for layer in layers]
    biases = [base.bias for base in bases if base.bias is not None]
    if len(biases) not in (0, len(bases)) or biased not in (None, bool(biases)):
        return None
    return Projections([base.weight for base in bases], biases, [_adapter(layer) for layer in layers])


def is_adapted(layer: Any) -> bool:
    """Return True if peft added LoRA adapters to this linear layer."""
    return (type(layer).__module__, type(layer).__name__) == _LORA


def unsupported_settings(model: torch.nn.Module) -> list[str]:
    """Return the settings of this model's LoRA adapters for which no kernels exist, once each."""
    layers = [layer for layer in model.modules() if is_adapted(layer)]
    return sorted({why for layer in layers if (why := unsupported(layer))})


def unsupported(layer: Any) -> str:
    """Return why a layer's code must run as it is: its type, or a setting of its adapters. Empty if snugfit's
    kernels compute the same.
    """
    if not is_adapted(layer):
        return f"a {type(layer).__name__}"
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) > 1 or layer.merged or layer.disable_adapters:
        return "several active adapters, merged or disabled ones"
    return next(_reasons(layer, names), "")


def _reasons(layer: Any, names: Sequence[str]) -> Iterator[str]:
    """Yield the unsupported settings of a layer and of these adapters."""
    modules = [layer.get_base_layer()]
    for name in names:
        modules += [layer.lora_A[name], layer.lora_B[name]]
        dropout, variant = layer.lora_dropout[name], layer.lora_variant.get(name)
        if not isinstance(dropout, torch.nn.Identity) and dropout.p > 0:
            yield "dropout of adapters"
        if variant is not None:
            yield VARIANTS.get(type(variant).__name__, type(variant).__name__)
        if layer.lora_B[name].bias is not None:
            yield "lora_bias"
    if layer.fan_in_fan_out:
        yield "fan_in_fan_out"
    # A hook expects to be called with this layer's input.
    if layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer):
        yield "hooks"
    if not all(map(is_plain, modules)):
        yield "other layers than torch.nn.Linear"


def _base(layer: Any) -> Any:
    return layer.get_base_layer() if is_adapted(layer) else layer


def _adapter(layer: Any) -> Adapter | None:
    """Return the factors of a layer's active adapter; None without one."""
    names = [name for name in layer.active_adapters if name in layer.lora_A] if is_adapted(layer) else []
    # An adapter that another module has active does not change this one.
    if not names:
        return None
    return Adapter(layer.lora_A[names[0]].weight, layer.lora_B[names[0]].weight, layer.scaling[names[0]])
