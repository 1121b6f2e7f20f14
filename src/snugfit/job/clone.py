"""A second module like the first, on the ambient device, for modules that come from Python.

On `meta` no weight may be copied: every parameter and buffer gets a counterpart without data before
`copy.deepcopy` starts, through its memo. Deepcopy then carries over everything else: ties (one tensor, one
counterpart), the modules' hooks, `requires_grad`, and plain attributes.

Deepcopy leaves functions as they are, and a function that a library has put in the place of a module's
`forward` holds that module in its closure (TRL's fused loss does): the copy would run the original. So such a
function is built anew, with the copy in the original's place.
"""

from __future__ import annotations

import copy
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


def clone_to_device(module: nn.Module) -> nn.Module:
    """A copy of `module` on the ambient `torch.device`; the original is left as it is."""
    import torch

    device = torch.get_default_device()
    if device.type != "meta":
        return _with_own_forwards(module, copy.deepcopy(module)).to(device)
    tensors = [*module.parameters(), *module.buffers()]
    with torch.no_grad():
        memo: dict[int, object] = {id(tensor): _meta_tensor(tensor) for tensor in tensors}
    clone = _with_own_forwards(module, copy.deepcopy(module, memo))
    for part in clone.modules():  # as `to` does, whose weights then lie in one buffer
        if isinstance(part, torch.nn.RNNBase):
            part.flatten_parameters()
    return clone


def _with_own_forwards(module: nn.Module, clone: nn.Module) -> nn.Module:
    """The clone, whose modules call each other where the original's do."""
    pairs = list(zip(module.modules(), clone.modules(), strict=True))
    clones = {id(original): copied for original, copied in pairs}
    for original, copied in pairs:
        if "forward" in original.__dict__:
            copied.__dict__["forward"] = _rebind(original.__dict__["forward"], clones)
    return clone


def _rebind(value: Any, clones: dict[int, nn.Module]) -> Any:
    """`value` with clones in the places of modules, in closures and methods too; itself when it has none."""
    if id(value) in clones:
        return clones[id(value)]
    if isinstance(value, MethodType):
        return MethodType(_rebind(value.__func__, clones), _rebind(value.__self__, clones))
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    try:
        contents = [cell.cell_contents for cell in value.__closure__]
    except ValueError:  # a name that is not bound yet
        return value
    rebound = [content if content is value else _rebind(content, clones) for content in contents]
    if all(new is old for new, old in zip(rebound, contents, strict=True)):
        return value
    cells = tuple(CellType(content) for content in rebound)
    function = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    function.__kwdefaults__ = value.__kwdefaults__
    function.__dict__.update(value.__dict__)
    return function


def _meta_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor or parameter of the same shape on `meta`. A buffer is copied: a rehearsal knows what it
    holds."""
    import torch
    from torch import nn

    if isinstance(tensor, nn.Parameter):
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)
