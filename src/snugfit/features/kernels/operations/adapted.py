"""Linear layers of a model as `Projections`: those of torch, and those to which peft added a LoRA adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from snugfit.features.kernels.operations.joint_linear import is_plain
from snugfit.features.kernels.operations.low_rank import Adapter
from snugfit.features.kernels.operations.philox import scale, threshold
from snugfit.features.kernels.operations.projections import Projections
from snugfit.step.own_forward import OwnForward

_LORA = ("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.bnb", "Linear4bit")
"""Module and name of peft's classes for linear layers with LoRA adapters."""

_FOUR_BITS = "bitsandbytes.nn.modules", "Linear4bit"
"""Module and name of bitsandbytes' class for 4-bit linear layers."""


DORA = "DoRA"
"""Name in messages of adapters that joint products do not support, and `decomposed_of` does."""

VARIANTS = {"DoraLinearVariant": DORA}
"""Names of LoRA's variants in messages, by their class names in peft."""


class FusedForward(OwnForward):
    """Forward pass of a module by snugfit's kernels."""


class AdaptedForward(FusedForward):
    """Forward pass of a linear layer with adapters by snugfit's kernels."""


def projections_of(layers: Sequence[Any], *, biased: bool | None = None) -> Projections | None:
    """Return the weights, biases and adapters of linear layers with one input.

    None if one of them is neither torch's own nor in 4 bits, or has unsupported adapters. None too if only
    some have a bias or 4 bits, or if a bias differs from `biased`.
    """
    if not all(_is_supported(layer) or objection(layer) == "" for layer in layers):
        return None
    bases = [_base(layer) for layer in layers]
    biases = [base.bias for base in bases if base.bias is not None]
    if len(biases) not in (0, len(bases)) or biased not in (None, bool(biases)):
        return None
    states = [quant_state(base) for base in bases if is_packed(base)]
    if len(states) not in (0, len(bases)):
        return None
    adapters = [_adapter(layer) for layer in layers]
    return Projections([base.weight for base in bases], biases, adapters, states)


def is_packed(layer: Any) -> bool:
    """Return True if this is bitsandbytes' linear layer in 4 bits."""
    return (type(layer).__module__, type(layer).__name__) == _FOUR_BITS


def quant_state(layer: Any) -> Any:
    """Return the `QuantState` of a linear layer in 4 bits; None before its weight is quantized."""
    # A weight that FSDP2 has gathered is a plain parameter without the state.
    return getattr(layer.weight, "quant_state", None) or getattr(layer, "quant_state", None)


def _is_supported(layer: Any) -> bool:
    """Return True for a linear layer of torch or in 4 bits, without a wrapper or hook."""
    if not is_packed(layer):
        return is_plain(layer)
    # bitsandbytes packs weights in another order for inference on a CPU.
    state = quant_state(layer)
    is_usual = state is not None and not getattr(state, "packing_format_for_cpu", False)
    return is_usual and layer.weight.size(-1) == 1 and not _is_hooked(layer)


def _is_hooked(layer: Any) -> bool:
    """Return True if a hook or a wrapper expects to be called with the layer's input."""
    wrapper = vars(layer).get("forward")
    is_wrapped = wrapper is not None and not isinstance(wrapper, AdaptedForward)
    return bool(layer._forward_hooks or layer._forward_pre_hooks or is_wrapped)


def is_adapted(layer: Any) -> bool:
    """Return True if peft added LoRA adapters to this linear layer."""
    return (type(layer).__module__, type(layer).__name__) in _LORA


def unsupported_settings(model: torch.nn.Module) -> list[str]:
    """Return the settings of this model's LoRA adapters for which no kernels exist, once each."""
    layers = [layer for layer in model.modules() if is_adapted(layer)]
    return sorted({reason for layer in layers if (reason := objection(layer)) not in ("", DORA)})


def decomposed_of(layer: Any) -> tuple[Projections, torch.Tensor, torch.Tensor | None] | None:
    """Return a linear layer with DoRA and no other unsupported setting: its weight and adapter, its magnitude
    (N,) and its bias (N,). None for other layers.
    """
    if not is_adapted(layer) or objection(layer) != DORA:
        return None
    base, [name] = layer.get_base_layer(), [name for name in layer.active_adapters if name in layer.lora_A]
    states = [base.weight.quant_state] if is_packed(base) else []
    projections = Projections([base.weight], (), [_adapter(layer)], states)
    return projections, layer.lora_magnitude_vector[name].weight, base.bias


def objection(layer: Any) -> str:
    """Return the reason why a layer must run its own code: its type, or a setting of its adapters. Empty if
    snugfit's kernels compute the same.
    """
    if not is_adapted(layer):
        return f"a {type(layer).__name__}"
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) > 1 or layer.merged or layer.disable_adapters:
        return "several active adapters, merged or disabled ones"
    # DoRA has kernels of its own, unless another reason forbids them.
    return min(_reasons(layer, names), key=lambda reason: reason == DORA, default="")


def _reasons(layer: Any, names: Sequence[str]) -> Iterator[str]:
    """Yield the unsupported settings of a layer and of these adapters."""
    modules = [layer.get_base_layer()]
    for name in names:
        modules += [layer.lora_A[name], layer.lora_B[name]]
        variant = layer.lora_variant.get(name)
        if type(layer.lora_dropout[name]) not in (torch.nn.Identity, torch.nn.Dropout):
            yield "dropout of another kind"
        if variant is not None and isinstance(layer.lora_dropout[name], torch.nn.Dropout):
            # peft drops elements of the input of the frozen weight's product too.
            yield "DoRA with dropout"
        if variant is not None:
            yield VARIANTS.get(type(variant).__name__, type(variant).__name__)
        if layer.lora_B[name].bias is not None:
            yield "lora_bias"
    if layer.fan_in_fan_out:
        yield "fan_in_fan_out"
    if _is_hooked(layer):
        yield "hooks"
    if not all(map(_is_supported, modules)):
        yield f"adapters of a {type(modules[0]).__name__}"


def drops_inputs(layer: Any) -> bool:
    """Return True if an adapter of this layer drops elements of its input in training."""
    dropouts = layer.lora_dropout.values() if is_adapted(layer) else ()
    return any(isinstance(dropout, torch.nn.Dropout) and dropout.p for dropout in dropouts)


def _base(layer: Any) -> Any:
    return layer.get_base_layer() if is_adapted(layer) else layer


def _adapter(layer: Any) -> Adapter | None:
    """Return the LoRA factors of a layer's active adapter; None without an adapter."""
    names = [name for name in layer.active_adapters if name in layer.lora_A] if is_adapted(layer) else []
    # The active adapter may belong to other modules and not change this one.
    if not names:
        return None
    name = names[0]
    dropout = layer.lora_dropout[name]
    # Outside of training, torch's dropout drops nothing.
    drops = threshold(dropout.p) if isinstance(dropout, torch.nn.Dropout) and dropout.training else 0
    scaling = layer.scaling[name] * scale(drops)
    return Adapter(layer.lora_A[name].weight, layer.lora_B[name].weight, scaling, drops)
