"""Saving and loading of adapters, of peft and of transformers' own `model.add_adapter`, in peft's files.

Each adapter is written in the form that `PeftModel.from_pretrained` and `load_adapter` read. Trainable base
weights go into the files of trained adapters, and peft loads them from there. peft's own `save_pretrained`
omits them. A resumed run does not use peft's rules. The model's state (`model_state.py`) maps each tensor of
a file to one of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from snugfit.errors import SnugfitError

if TYPE_CHECKING:
    import torch

ADAPTER = "adapter_model.safetensors"
DEFAULT = "default"
"""Name of the adapter whose files peft saves into the checkpoint folder itself instead of a subfolder."""

_BASE = "base_model.model."
"""Prefix of the names of base model weights in peft's files."""

_IMPORTANCE = ("ipt", "exp_avg_ipt", "exp_avg_unc")
"""Names of the statistics that AdaLoRA's rank allocator keeps for each parameter."""


def is_adapted(model: torch.nn.Module) -> bool:
    """Return True if this model has peft adapters."""
    return isinstance(getattr(model, "peft_config", None), Mapping) and bool(model.peft_config)


def is_of_adapter(model: Any, name: str) -> bool:
    """Return True if a tensor of this name belongs to an adapter."""
    parts = name.split(".")
    return parts[0] == "prompt_encoder" or any(part in model.peft_config for part in parts)


def address_of(tensor: torch.Tensor) -> int:
    """Return a tensor's memory address, which is equal for two names of one tensor.

    A tensor without memory of its own (sparse, some quantizers' shells) gets a unique number.
    """
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return -id(tensor)


def active_adapters(model: Any) -> list[str]:
    """Return the names of the peft adapters that the model's forward pass uses."""
    active = getattr(model, "active_adapters", [])
    return sorted(active() if callable(active) else active)


def refuse_unsaved_adapters(model: Any) -> None:
    """Raise `SnugfitError` for adapters whose weights are not in the model, because checkpoints cannot
    contain them.
    """
    kinds = [config.peft_type for config in model.peft_config.values()]
    if len(kinds) > 1 and "ADAPTION_PROMPT" in kinds:
        raise SnugfitError(
            "The model has several adapters, one of them an adaption prompt. peft removes those that are "
            "not active from the model, so no checkpoint could contain them. Train one adapter at a time."
        )


def files_of(
    model: Any, weights: Mapping[str, torch.Tensor]
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Return the content of peft's adapter files: tensors by name and the config, each by the adapter's
    folder.

    `weights` is the model's `state_dict`.
    """
    from peft import get_peft_model_state_dict

    from snugfit.training.rng import preserve_rng

    device = next(model.parameters()).device
    with preserve_rng(device):  # the prompt encoder may use dropout
        exports = {
            name: dict(
                get_peft_model_state_dict(
                    model, state_dict=dict(weights), adapter_name=name, save_embedding_layers=False
                )
            )
            for name in model.peft_config
        }
    base = _base_weights_that_train(model, [value for named in exports.values() for value in named.values()])
    trained = {address_of(parameter) for parameter in model.parameters() if parameter.requires_grad}
    is_prompt = {name: config.is_prompt_learning for name, config in model.peft_config.items()}
    for name, named in exports.items():
        if is_prompt[name] or any(address_of(value) in trained for value in named.values()):
            named.update(base)
    # Adapters that were injected without a `PeftModel` have names without the prefix of peft's files.
    prefix = "" if hasattr(model, "get_base_model") else _BASE
    # The adapter's name may contain a slash, which is not allowed in a folder's name.
    folders = {name: "" if name == DEFAULT else quote(name, safe="") for name in exports}
    files = {
        str(Path(folders[name]) / ADAPTER): {f"{prefix}{key}": value for key, value in named.items()}
        for name, named in exports.items()
    }
    # A thread writes the config, while the training may change it.
    return files, {folders[name]: copy.deepcopy(config) for name, config in model.peft_config.items()}


def _base_weights_that_train(model: Any, exports: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the trainable weights that belong to no adapter."""
    addresses = {address_of(value) for value in exports}

    return {
        name: weight.detach()
        for name, weight in model.named_parameters()
        if weight.requires_grad and address_of(weight) not in addresses and not is_of_adapter(model, name)
    }


def allocator_states(model: torch.nn.Module) -> dict[str, Any]:
    """Return the statistics of AdaLoRA's rank allocators by their module's name, because no `state_dict` has
    them.
    """
    return {
        name: {
            **{field: dict(getattr(allocator, field)) for field in _IMPORTANCE},
            "rank_pattern": allocator.peft_config.rank_pattern,
        }
        for name, allocator in _allocators(model)
    }


def restore_allocators(model: torch.nn.Module, states: Mapping[str, Any]) -> None:
    """Restore the statistics of AdaLoRA's rank allocators, as `allocator_states` returned them."""
    for name, allocator in _allocators(model):
        state = dict(states[name])
        allocator.peft_config.rank_pattern = state.pop("rank_pattern")
        vars(allocator).update(state)


def _allocators(model: torch.nn.Module) -> list[tuple[str, Any]]:
    return [
        (name, vars(module)["rankallocator"])
        for name, module in model.named_modules()
        if "rankallocator" in vars(module)
    ]
