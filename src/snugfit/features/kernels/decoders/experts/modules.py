"""Experts of transformers' decoders, and the adapters that peft adds to their parameters.

transformers stores the weights of all experts of a layer in one parameter of three dimensions. peft adapts
it by a `ParamWrapper`, and two parameters of one module by two nested wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.utils.parametrize import type_before_parametrizations

from snugfit.features.kernels.decoders.experts.activation import CLAMPED, SILU, TANH, Gate
from snugfit.features.kernels.decoders.experts.expert_mlp import expert_mlp
from snugfit.features.kernels.decoders.experts.forms import FORMS, ExpertsForm
from snugfit.features.kernels.decoders.experts.grouped_linear import ALIGNMENT, ExpertLinear
from snugfit.features.kernels.decoders.experts.mxfp4 import Mxfp4Weight
from snugfit.features.kernels.decoders.same_code import same_as
from snugfit.features.kernels.operations.gated_mlp import RECOMPUTES
from snugfit.features.kernels.operations.operators import activation_dtype, has_kernel
from snugfit.step.own_forward import OwnForward

_WRAPPER = "peft.tuners.lora.layer", "ParamWrapper"
"""Module and name of peft's class for an adapted parameter."""

_PACKED = "bitsandbytes.nn.parametrize", "Bnb4bitParametrization"
"""Module and name of bitsandbytes' class for a parameter in 4 bits."""

_KINDS = {"SiLU": SILU, "SiLUActivation": SILU, "GELUTanh": TANH}
"""Supported activations by their class names."""


def fuse_experts(model: torch.nn.Module) -> list[str]:
    """Replace the forward passes of this model's supported experts. Return the replaced class names."""
    changed: dict[str, None] = {}
    inner: set[torch.nn.Module] = set()
    for module in model.modules():
        chain = _chain(module)
        form = _form(chain[-1])
        # A wrapper comes before the modules in it.
        if form is None or module in inner or "forward" in vars(module):
            continue
        inner.update(chain)
        if _gate(chain[-1], form) is None:
            continue
        module.forward = OwnForward(partial(_run, form), module)
        # False marks a gated MLP. `fused(recomputed_mlps)` sets some of them to True.
        setattr(module, RECOMPUTES, False)
        changed[type_before_parametrizations(chain[-1]).__name__] = None
    return list(changed)


def _chain(module: Any) -> list[Any]:
    """Return a module and those that peft's wrappers of parameters have in them, from the outside."""
    chain = [module]
    while _is_wrapper(chain[-1]):
        chain.append(chain[-1].base_layer)
    return chain


def _is_wrapper(module: Any) -> bool:
    return _path(module) == _WRAPPER


def _path(module: Any) -> tuple[str, str]:
    return type(module).__module__, type(module).__name__


def _form(module: Any) -> ExpertsForm | None:
    # A module with packed weights has a class of torch's own.
    reference = same_as(type_before_parametrizations(module), "Experts", FORMS)
    return None if reference is None else FORMS[reference]


def _gate(experts: Any, form: ExpertsForm) -> Gate | None:
    """Return the activation of experts; None for an unsupported one."""
    if form.is_clamped:
        return Gate(CLAMPED, float(experts.alpha), float(experts.limit))
    kind = _KINDS.get(type(experts.act_fn).__name__)
    return None if kind is None else Gate(kind)


def _run(form: ExpertsForm, module: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
    """Run the experts on tokens (T, H), experts (T, k) and weights (T, k) by grouped products."""
    # The method of the class, because this one replaces that of the instance.
    original: Callable[..., torch.Tensor] = partial(type(module).forward, module)
    chain = _chain(module)
    layers = _layers(chain, form)
    if not module.training or keywords or len(arguments) != 3 or layers is None:
        return original(*arguments, **keywords)
    hidden, index, weights = arguments
    if hidden.dim() != 2 or (has_kernel(hidden) and not _fits_kernels(layers, activation_dtype(hidden))):
        return original(*arguments)
    gate = _gate(chain[-1], form)
    assert gate is not None
    return expert_mlp(
        hidden,
        weights,
        index,
        layers,
        chain[-1].num_experts,
        gate,
        keeps=not getattr(module, RECOMPUTES, False),
    )


def _layers(chain: Sequence[Any], form: ExpertsForm) -> tuple[ExpertLinear, ExpertLinear] | None:
    """Return gate and up in one, and down, with their adapters; None if something is unsupported."""
    *wrappers, experts = chain
    if getattr(experts, "_is_expert_parallel", False) or any(map(_is_hooked, chain[1:])):
        return None
    adapters = [_adapter(wrapper) for wrapper in wrappers]
    if None in adapters:
        return None
    by_name = {wrapper.parameter_name: pair for wrapper, pair in zip(wrappers, adapters, strict=True)}
    if by_name.keys() - {"gate_up_proj", "down_proj"} or len(by_name) < len(wrappers):
        return None
    into, back = (
        _linear(experts, name, form, by_name.get(name) or ()) for name in ("gate_up_proj", "down_proj")
    )
    return None if into is None or back is None else (into, back)


def _linear(experts: Any, name: str, form: ExpertsForm, adapter: tuple[Any, ...]) -> ExpertLinear | None:
    """Return one linear layer of the experts; None for a weight in an unsupported format."""
    packed = getattr(experts, "parametrizations", {})
    bias = getattr(experts, f"{name}_bias") if form.has_bias else None
    if name not in packed:
        return ExpertLinear(getattr(experts, name), form.is_turned, None, bias, *adapter)
    formats = list(packed[name])
    if len(formats) == 1 and isinstance(formats[0], Mxfp4Weight):
        # Packed weights are stored as (E, N, K), unlike the parameter (E, K, N).
        return ExpertLinear(packed[name].original, False, formats[0], bias, *adapter)
    if len(formats) > 1 or _path(formats[0]) != _PACKED:
        return None
    return ExpertLinear(packed[name].original, form.is_turned, formats[0].quant_state, bias, *adapter)


def _is_hooked(module: Any) -> bool:
    # bitsandbytes' hooks only cache unpacked weights.
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(hook.__module__ != _PACKED[0] for hook in hooks)


def _adapter(wrapper: Any) -> tuple[Any, ...] | None:
    """Return A, B and the scale of a wrapper's active adapter; empty without one, None if unsupported."""
    names = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if wrapper.merged or len(names) > 1 or wrapper.num_experts == 1:
        return None
    if wrapper.disable_adapters or not names:
        return ()
    name = names[0]
    return wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, float(wrapper.scaling[name])


def _fits_kernels(layers: Sequence[ExpertLinear], dtype: torch.dtype) -> bool:
    """Return True if torch's grouped products take these sizes: rows of a multiple of 16 bytes."""
    sizes = [size for layer in layers for size in layer.sizes]
    return not any(size * dtype.itemsize % ALIGNMENT for size in sizes)
