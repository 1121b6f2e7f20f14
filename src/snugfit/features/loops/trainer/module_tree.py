"""A cached list of a model's modules, for loops that read them in each step.

transformers' Trainer calls `model.train()` and counts the model's parameters for every micro-batch, and lists
them for clipping. Each traversal of all modules takes CPU time, which limits the speed of small steps.
Checking the list for changes is much faster. After a change the modules are traversed again, so the results
equal those of the model's own methods.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

KNOWN = ("torch.nn.modules.module", "transformers.modeling_utils")
"""Files of libraries whose methods may be replaced. A model with its own method keeps it."""

_WALKS = ("parameters", "named_parameters", "modules", "named_modules")
USED_BY = {"train": ("train",), "parameters": _WALKS, "num_parameters": ("num_parameters", *_WALKS)}
"""The methods that each replaced method calls itself."""

_VALUES = methodcaller("values")
_IS_TRAINING = attrgetter("training")


class ModuleTree:
    """A cached list of a model's modules with their children and parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._counted: dict[bool, tuple[list[nn.Parameter], int]] = {}
        self._answers: dict[str, Any] = {}
        self._list_modules()

    def _list_modules(self) -> None:
        self._modules = list(self.model.modules())
        self._child_dicts = [module._modules for module in self._modules]
        self._parameter_dicts = [module._parameters for module in self._modules]
        self._children = self._current_children()
        self._has_known_train = all(_is_known(module, "train") for module in self._modules)

    def _current_children(self) -> list[Any]:
        return list(chain.from_iterable(map(_VALUES, self._child_dicts)))

    def modules(self) -> list[nn.Module]:
        """Return each module once, as `model.modules()` does, including changes since the last call."""
        if not _are_same(self._current_children(), self._children):
            self._list_modules()
        return self._modules

    def train(self, mode: bool = True) -> nn.Module:
        """Set the training mode of all modules, as `model.train(mode)` does."""
        if mode is True and all(map(_IS_TRAINING, self.modules())) and self._has_known_train:
            return self.model
        return type(self.model).train(self.model, mode)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Iterate over the parameters as `model.parameters(recurse)` does, each once, in the order of the
        modules.
        """
        return iter(self._all_parameters()) if recurse else type(self.model).parameters(self.model, recurse)

    def _all_parameters(self) -> list[nn.Parameter]:
        self.modules()
        parameters = dict.fromkeys(chain.from_iterable(map(_VALUES, self._parameter_dicts)))
        parameters.pop(None, None)  # the bias of a layer without one is None
        return list(parameters)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of elements of all parameters, as transformers' `model.num_parameters(...)` does.

        All parameters are counted again after one was added, removed or replaced; trainable ones at each
        call.
        """
        kind: Any = type(self.model)
        count = kind.num_parameters
        if only_trainable:
            return int(count(self.model, True, exclude_embeddings))
        parameters = self._all_parameters()
        known = self._counted.get(exclude_embeddings)
        if known is None or not _are_same(known[0], parameters):
            known = self._counted[exclude_embeddings] = (
                parameters,
                count(self.model, False, exclude_embeddings),
            )
        return known[1]

    @contextlib.contextmanager
    def answering(self, name: str) -> Iterator[None]:
        """Context in which the model's method `name`, one of `USED_BY`, is replaced by the cached one here.
        `withdraw` ends it earlier.

        A model class that overrides this method keeps its own.
        """
        if all(_is_known(self.model, used) for used in USED_BY[name]):
            self.model.__dict__[name] = self._answers[name] = getattr(self, name)
        try:
            yield
        finally:
            self.withdraw()

    def withdraw(self) -> None:
        """Restore the model's own methods in place of the cached ones."""
        for name, answer in self._answers.items():
            if self.model.__dict__.get(name) is answer:
                del self.model.__dict__[name]
        self._answers.clear()


def _is_known(module: nn.Module, name: str) -> bool:
    method = getattr(type(module), name, None)
    return name not in module.__dict__ and getattr(method, "__module__", "") in KNOWN


def _are_same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))
