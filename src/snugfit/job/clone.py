"""Deep copies of modules from Python, on the ambient device, without references to the original.

Deepcopy leaves functions as they are. In the copy, a closure over a module would run the original module.
Examples are TRL's fused loss in the place of `forward`, a hook, or an attribute such as `self.call = lambda
x: self.block(x)`. So such a function is created again, with the copy in place of the original.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


def clone_to_device(module: nn.Module) -> nn.Module:
    """Return a copy of `module` on the ambient `torch.device`; the original is left as it is."""
    import torch

    device = torch.get_default_device()
    if device.type != "meta":
        return _with_own_functions(module, copy.deepcopy(module)).to(device)
    tensors = [*module.parameters(), *module.buffers()]
    with torch.no_grad():
        # Deepcopy takes counterparts from its memo, so no weight is copied; ties and hooks are copied as
        # usual.
        memo: dict[int, object] = {id(tensor): _meta_tensor(tensor) for tensor in tensors}
    return _with_own_functions(module, copy.deepcopy(module, memo))


def _with_own_functions(module: nn.Module, clone: nn.Module) -> nn.Module:
    """Rebind functions of the clone that refer to modules of the original, so that they refer to the clone's.
    Return the clone."""
    pairs = list(zip(module.modules(), clone.modules(), strict=True))
    clones: dict[int, Any] = {id(original): copied for original, copied in pairs}
    for _, copied in pairs:
        attributes = copied.__dict__
        # Hooks are in dictionaries of the module, and replaced methods are its own attributes.
        for container in (attributes, *(value for value in attributes.values() if isinstance(value, dict))):
            for name, value in list(container.items()):
                if _reaches(value, clones, set()):
                    container[name] = _rebind(value, clones)
    return clone


def _parts(value: Any) -> Iterator[Any]:
    """Yield the objects that a function (closure, defaults, bound object), a method or a list refers to."""
    if isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif type(value) is functools.partial:
        yield value.func
    elif type(value) in (list, tuple):
        yield from value
    elif isinstance(value, FunctionType):
        # A closure's cells may contain the module.
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # a name that is not bound yet
                yield cell.cell_contents


def _reaches(value: Any, clones: dict[int, Any], visited: set[int]) -> bool:
    """Return True if `value`, a function or a list of them, refers to a module of the original model."""
    if id(value) in clones or id(value) in visited:
        return id(value) in clones
    # Functions may refer to each other in a cycle.
    visited.add(id(value))
    return any(_reaches(part, clones, visited) for part in _parts(value))


def _rebind(value: Any, clones: dict[int, Any]) -> Any:
    """Return `value` with modules replaced by their clones; `value` itself if it refers to none.

    `clones` are the copies of modules, functions and the cells of closures, by the id of the original.
    """
    if id(value) in clones:
        return clones[id(value)]
    if not _reaches(value, clones, set()):
        return value
    if isinstance(value, MethodType):
        return MethodType(*(_rebind(part, clones) for part in _parts(value)))
    if type(value) is functools.partial:
        return functools.partial(_rebind(value.func, clones), *value.args, **value.keywords)
    if type(value) in (list, tuple):
        return type(value)(_rebind(part, clones) for part in value)
    # Functions that share a cell must share its copy too.
    cells = [clones.setdefault(id(cell), CellType()) for cell in value.__closure__]
    function = FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells)
    )
    clones[id(value)] = function  # the function may call itself
    function.__kwdefaults__ = value.__kwdefaults__
    # Attributes of the function, such as `__wrapped__`, stay.
    function.__dict__.update(value.__dict__)
    for cell, original in zip(cells, value.__closure__, strict=True):
        with contextlib.suppress(ValueError):
            # The cell is filled last, because it may contain the function itself.
            cell.cell_contents = _rebind(original.cell_contents, clones)
    return function


def _meta_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor or parameter of the same shape on `meta`.

    The values of a buffer are copied, since a simulation reads them.
    """
    import torch
    from torch import nn

    if isinstance(tensor, nn.Parameter):
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    # Values of a buffer are read in a simulation (positions, masks), so they are moved and not dropped.
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)
