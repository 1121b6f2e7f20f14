"""What modules remember in plain attributes: a count, a switch, a queue of samples that is no buffer; and
which parameters train, which may change during a run.

No `state_dict` has them, and a step may depend on them: a rotary embedding that grows with its sequences
remembers how far in a number. Numbers are kept once they are no longer what they were when the run began;
what they were then is the constructor's, or what the user has set. Tensors are always kept, but for those
that are parameters and buffers under another name, and results that still have their graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from snugfit.training.checkpoint.adapters import address_of

if TYPE_CHECKING:
    import torch

Numbers = Mapping[tuple[str, str], Any]
"""By the name of the module and of the attribute."""

_SWITCHES = frozenset({"training", "gradient_checkpointing"})
"""Attributes that loops set, and that are no memory."""

_MARKS = ("_is_", "_hf_", "ds_", "applied_pre_backward_")
"""How the names of marks begin that accelerate, transformers and DeepSpeed leave on a model.
`_is_accelerate_prepared`, put back in another process, would keep accelerate from wrapping the model in
autocast."""


def _is_memory(name: str) -> bool:
    """Whether an attribute of this name may be what a module remembers."""
    return name not in _SWITCHES and not name.startswith(_MARKS)


def numbers_of(model: torch.nn.Module) -> Numbers:
    """All numbers and switches that modules have as attributes."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in (bool, int, float) and _is_memory(name)
    }


def attributes_to_keep(model: torch.nn.Module, before: Numbers) -> dict[str, dict[str, Any]]:
    """Numbers that are no longer as `before`, and tensors, by module and attribute."""
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
    """Sets what `attributes_to_keep` gave. A module that another version of its library has not is passed
    over, for so is what needed it."""
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
    """The names of those that do not train."""
    return [name for name, weight in model.named_parameters() if not weight.requires_grad]


def set_frozen(model: torch.nn.Module, names: Collection[str] | None) -> None:
    """Has the parameters of these names not train, and all others train. Nothing for None, where an older
    checkpoint does not say."""
    if names is None:
        return
    frozen = frozenset(names)
    for name, weight in model.named_parameters():
        if weight.requires_grad == (name in frozen):
            weight.requires_grad_(name not in frozen)
