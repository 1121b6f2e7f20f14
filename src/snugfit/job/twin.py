"""A second module like the first, on the ambient device, for modules that come from Python.

On `meta` no weight may be copied: every parameter and buffer is given a twin without data before
`copy.deepcopy` starts, through its memo. Deepcopy then carries over everything else: ties (one tensor, one
twin), the modules' hooks, `requires_grad`, and plain attributes.

Deepcopy leaves functions as they are, and what a library has put in the place of a module's `forward` holds
that module in its closure (TRL's fused loss does): the copy would run the original. So such a function is
made anew, with the copy in the original's place.
"""

from __future__ import annotations

import copy
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


def twin(module: nn.Module) -> nn.Module:
    """A copy of `module` on the ambient `torch.device`; the original is left as it is."""
    import torch

    device = torch.get_default_device()
    if device.type != "meta":
        return _with_own_forwards(module, copy.deepcopy(module)).to(device)
    with torch.no_grad():
        memo: dict[int, object] = {id(tensor): _meta_twin(tensor) for tensor in _tensors(module)}
    return _with_own_forwards(module, copy.deepcopy(module, memo))


def _with_own_forwards(module: nn.Module, made: nn.Module) -> nn.Module:
    """The copy, whose modules call each other where the original's do."""
    twins = {id(one): other for one, other in zip(module.modules(), made.modules(), strict=True)}
    for one, other in zip(module.modules(), made.modules(), strict=True):
        if "forward" in one.__dict__:
            other.__dict__["forward"] = _rebound(one.__dict__["forward"], twins)
    return made


def _rebound(value: Any, twins: dict[int, nn.Module]) -> Any:
    """The function, or what one holds, with twins in the places of modules; itself when it holds none."""
    if id(value) in twins:
        return twins[id(value)]
    if isinstance(value, MethodType):
        return MethodType(_rebound(value.__func__, twins), _rebound(value.__self__, twins))
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    try:
        held = [cell.cell_contents for cell in value.__closure__]
    except ValueError:  # a name that is not bound yet
        return value
    found = [each if each is value else _rebound(each, twins) for each in held]
    if all(new is old for new, old in zip(found, held, strict=True)):
        return value
    cells = tuple(CellType(each) for each in found)
    made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    made.__kwdefaults__ = value.__kwdefaults__
    made.__dict__.update(value.__dict__)
    return made


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _meta_twin(tensor: torch.Tensor) -> torch.Tensor:
    import torch
    from torch import nn

    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)
