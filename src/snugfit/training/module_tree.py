"""A model's modules listed once, for a loop that asks all of them each step.

transformers' Trainer calls `model.train()` and counts the model's parameters for every micro-batch, and lists
them to clip. Each of these walks through all modules takes the host some time, and a small step is bound by
the host. Whether anything in a list has changed is seen much sooner, and what has changed is walked through
anew: so the answers are those of the model's own methods, at every call.
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
"""Files whose methods are known to do what is done here. A model with a method of its own keeps it."""

_WALKS = ("parameters", "named_parameters", "modules", "named_modules")
USED_BY = {"train": ("train",), "parameters": _WALKS, "num_parameters": ("num_parameters", *_WALKS)}
"""By a method that is answered here, those that it calls."""

_VALUES = methodcaller("values")
_IS_TRAINING = attrgetter("training")


class ModuleTree:
    """All modules of a model, and what they hold now."""

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
        """Each module once, as `model.modules()`; listed anew where one was added, removed or replaced."""
        if not _are_same(self._current_children(), self._children):
            self._list_modules()
        return self._modules

    def train(self, mode: bool = True) -> nn.Module:
        """Does what `model.train(mode)` does."""
        if mode is True and all(map(_IS_TRAINING, self.modules())) and self._has_known_train:
            return self.model
        return type(self.model).train(self.model, mode)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Gives what `model.parameters(recurse)` gives: each once, in the order of the modules."""
        return iter(self._all_parameters()) if recurse else type(self.model).parameters(self.model, recurse)

    def _all_parameters(self) -> list[nn.Parameter]:
        self.modules()
        parameters = dict.fromkeys(chain.from_iterable(map(_VALUES, self._parameter_dicts)))
        parameters.pop(None, None)  # what a layer without a bias has in its place
        return list(parameters)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Gives what `model.num_parameters(...)` of transformers gives. All are counted again where one was
        added, removed or replaced; those that train, each time."""
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
        """Within it, until `withdraw`, the model's method of this name, one of `USED_BY`, is the one here; a
        model with such a method of its own keeps it."""
        if all(_is_known(self.model, used) for used in USED_BY[name]):
            self.model.__dict__[name] = self._answers[name] = getattr(self, name)
        try:
            yield
        finally:
            self.withdraw()

    def withdraw(self) -> None:
        """The model's methods are its own again."""
        for name, answer in self._answers.items():
            if self.model.__dict__.get(name) is answer:
                del self.model.__dict__[name]
        self._answers.clear()


def _is_known(module: nn.Module, name: str) -> bool:
    method = getattr(type(module), name, None)
    return name not in module.__dict__ and getattr(method, "__module__", "") in KNOWN


def _are_same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))
