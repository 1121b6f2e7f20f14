"""Adapters of peft, and of transformers' own `model.add_adapter`: what peft's files hold of them.

Each adapter is written as `PeftModel.from_pretrained` and `load_adapter` read it. Base weights that train
beside the adapters go into the files of those that train, which peft loads too; its own `save_pretrained`
leaves them out. A resumed run reads none of this by peft's rules: which tensor of a file is which of the
model stands in the model's state (`model_state.py`).
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
"""The adapter whose files peft puts into the folder itself."""

_BASE = "base_model.model."
"""How names begin in peft's files."""

_IMPORTANCE = ("ipt", "exp_avg_ipt", "exp_avg_unc")
"""What AdaLoRA's rank allocator has seen of each parameter, by its own names."""


def is_adapted(model: torch.nn.Module) -> bool:
    """Whether adapters stand in this model."""
    return isinstance(getattr(model, "peft_config", None), Mapping) and bool(model.peft_config)


def is_of_adapter(model: Any, name: str) -> bool:
    """Whether a tensor of this name belongs to an adapter, whose own name is a part of it."""
    parts = name.split(".")
    return parts[0] == "prompt_encoder" or any(part in model.peft_config for part in parts)


def address_of(tensor: torch.Tensor) -> int:
    """By which a tensor is known under several names; one without memory of its own (sparse, some quantizers'
    shells) by itself alone."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return -id(tensor)


def active_adapters(model: Any) -> list[str]:
    """The adapters that the forward pass uses."""
    active = getattr(model, "active_adapters", [])
    return sorted(active() if callable(active) else active)


def refuse_what_cannot_be_kept(model: Any) -> None:
    """Raises `SnugfitError` for adapters that hold weights outside of the model."""
    kinds = [config.peft_type for config in model.peft_config.values()]
    if len(kinds) > 1 and "ADAPTION_PROMPT" in kinds:
        raise SnugfitError(
            "The model has several adapters, one of them an adaption prompt. peft removes those that are "
            "not active from the model, so no checkpoint could contain them. Train one adapter at a time."
        )


def files_of(
    model: Any, weights: Mapping[str, torch.Tensor]
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """peft's files of each adapter, with tensors by their names in it, and its config by its folder, of a
    model with these `weights`, its `state_dict`."""
    from peft import get_peft_model_state_dict

    from snugfit.training.rng import preserve_rng

    device = next(model.parameters()).device
    with preserve_rng(device):  # a prompt's encoder may drop out
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
    prefix = "" if hasattr(model, "get_base_model") else _BASE
    folders = {name: "" if name == DEFAULT else quote(name, safe="") for name in exports}
    files = {
        str(Path(folders[name]) / ADAPTER): {f"{prefix}{key}": value for key, value in named.items()}
        for name, named in exports.items()
    }
    return files, {folders[name]: copy.deepcopy(config) for name, config in model.peft_config.items()}


def _base_weights_that_train(model: Any, exports: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights that train and belong to no adapter."""
    addresses = {address_of(value) for value in exports}

    return {
        name: weight.detach()
        for name, weight in model.named_parameters()
        if weight.requires_grad and address_of(weight) not in addresses and not is_of_adapter(model, name)
    }


def load_old(model: Any, folder: Path) -> None:
    """Loads a checkpoint that was written when only the adapter called "default" was kept.

    Raises `SnugfitError` when more than that trains, for it is lost.
    """
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    left = set_peft_model_state_dict(model, load_file(folder / ADAPTER))
    lost = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name in left.missing_keys and not name.endswith(".embedding.weight")
    ]
    if lost or left.unexpected_keys:
        names = ", ".join([*lost, *left.unexpected_keys][:3])
        raise SnugfitError(
            f"{folder} was written by an older snugfit, which saved one adapter and nothing else that "
            f"trains: {names} would start again. Train with that version of snugfit, or start a new run."
        )


def allocator_states(model: torch.nn.Module) -> dict[str, Any]:
    """What AdaLoRA's rank allocators have seen, by their module's name: they keep it outside of the model."""
    return {
        name: {
            **{field: dict(getattr(allocator, field)) for field in _IMPORTANCE},
            "rank_pattern": allocator.peft_config.rank_pattern,
        }
        for name, allocator in _allocators(model)
    }


def restore_allocators(model: torch.nn.Module, states: Mapping[str, Any]) -> None:
    """Sets what `allocator_states` gave."""
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
