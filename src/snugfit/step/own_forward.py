"""A replacement of one module's forward method that does not keep the module alive.

A module with its own bound method as an attribute forms a reference cycle. After its last use, its weights
stay on the GPU until Python's garbage collector runs. The collector counts objects and not their size.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError

if TYPE_CHECKING:
    import torch


class OwnForward:
    """Replacement for a module's forward method, with no strong reference to the module. It calls `function`
    with the module before all other arguments. A copy of the module gets a replacement of its own.
    """

    def __init__(self, function: Callable[..., Any], module: torch.nn.Module) -> None:
        self._function, self._module = function, weakref.ref(module)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the function on the module. Raises `SnugfitError` once the module is deleted."""
        module = self._module()
        if module is None:
            raise SnugfitError("This forward pass is of a module that no longer exists. Keep the model.")
        return self._function(module, *arguments, **keywords)

    @property
    def __signature__(self) -> inspect.Signature:
        # The Trainer chooses the columns of a dataset by the signature of `forward`.
        return inspect.signature(MethodType(self._function, self._module()))

    def __reduce__(self) -> tuple[Any, ...]:
        # A weak reference can be neither copied nor pickled.
        return type(self), (self._function, self._module())


def forward_of(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the module's current forward method, in a wrapper that the module can store without a reference
    cycle.
    """
    forward = module.forward
    if isinstance(forward, MethodType) and forward.__self__ is module:
        return OwnForward(forward.__func__, module)
    return forward
