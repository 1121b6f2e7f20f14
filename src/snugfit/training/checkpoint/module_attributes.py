"""The state of modules in plain attributes (a count, a switch, a queue of samples), and the trainable
parameters.

The set of trainable parameters may change during a run. No `state_dict` has plain attributes, and a step may
depend on them. A rotary embedding that grows with its sequences stores its size in a number, for example.
Numbers are saved once they differ from their value at the start of the run. The constructor or the user has
set that value. Tensors are always saved. Exceptions are parameters and buffers under another name, and
results that still have their graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from snugfit.training.checkpoint.adapters import address_of

if TYPE_CHECKING:
    import torch

Numbers = Mapping[tuple[str, str], Any]
"""Values by the names of module and attribute."""

_SWITCHES = frozenset({"training", "gradient_checkpointing"})
"""Attributes that loops set, and that are not a state."""

_MARKS = ("_is_", "_hf_", "ds_", "applied_pre_backward_")
"""Prefixes of marks that accelerate, transformers and DeepSpeed leave on a model.

A restored `_is_accelerate_prepared` in another process would keep accelerate from wrapping the model in
autocast.
"""


def _is_memory(name: str) -> bool:
    """Return True if an attribute of this name may be part of a module's state."""
    return name not in _SWITCHES and not name.startswith(_MARKS)


def numbers_of(model: torch.nn.Module) -> Numbers:
    """Return all numbers and switches in the attributes of modules."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in (bool, int, float) and _is_memory(name)
    }


def attributes_to_keep(model: torch.nn.Module, before: Numbers) -> dict[str, dict[str, Any]]:
    """Return the numbers that differ from `before`, and tensors, by module and attribute."""
    attributes: dict[str, dict[str, Any]] = {}
    for (path, name), value in numbers_of(model).items():
        if (path, name) not in before or before[path, name] != value:
            attributes.setdefault(path, {})[name] = value
    for path, name, tensor in _plain_tensors(model):
        attributes.setdefault(path, {})[name] = tensor
    return attributes


def _plain_tensors(model: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    import torch

    addresses = {address_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            is_left_out = type(value) is not torch.Tensor or not value.is_leaf or value.is_meta
            if not is_left_out and value.layout == torch.strided and value.data_ptr() not in addresses:
                yield path, name, value


def restore_attributes(model: torch.nn.Module, attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore the attributes of `attributes_to_keep`.

    A module that another version of its library lacks is ignored, because its user is gone too.
    """
    import torch

    modules = dict(model.named_modules())
    for path, values in attributes.items():
        for name, value in values.items():
            if path not in modules or not _is_memory(name):
                continue
            own = vars(modules[path]).get(name)
            if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor) and own.shape == value.shape:
                with torch.no_grad():
                    own.copy_(value)
            else:
                setattr(modules[path], name, value)


def frozen_parameters(model: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that do not train."""
    return [name for name, weight in model.named_parameters() if not weight.requires_grad]


def set_frozen(model: torch.nn.Module, names: Collection[str] | None) -> None:
    """Freeze the parameters of these names, and unfreeze all others.

    None, from an older checkpoint, changes nothing.
    """
    if names is None:
        return
    frozen = frozenset(names)
    for name, weight in model.named_parameters():
        if weight.requires_grad == (name in frozen):
            weight.requires_grad_(name not in frozen)
