"""Random generators and counters inside the objects of a user's data, saved and restored with a run.

A dataset may draw from `self.rng`. A collator may create a generator with its first batch, and a sampler may
receive one. A stream may count its epochs to seed them. The process's random states contain none of these. So
the objects reachable from a loader are searched once an epoch. Attributes with such values are saved and
restored:

- a random generator: torch's, Python's `random.Random`, numpy's `Generator` and `RandomState`
- None, which may be replaced by a generator later
- a plain number in an object of the user's own classes; for libraries' objects `set_epoch` sets it

A generator in a closure cannot be replaced, but its state can be set. State elsewhere (a module's global, the
clock, the system's entropy) is not found. A comparison of batches detects its effect (`loader.py`).
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from snugfit.errors import SnugfitError

DEEPEST = 5
"""Largest number of references between the loader and an object that is searched for generators."""

LARGEST = 64
"""Largest length of a list or mapping that is searched. A longer one contains samples."""

MOST = 2_000
"""Largest number of objects that are searched in one loader."""

LIBRARIES = frozenset({"accelerate", "datasets", "logging", "numpy", "torch", "torchvision", "transformers"})
"""Packages whose objects are not searched for counters, because these would not be the user's."""

State = dict[str, Any]
"""The type of generator states by attribute path, such as `dataset.rng`. A value is JSON data, or [kind,
state] of a generator.
"""


@final
class OwnState:
    """The random generators and counters in objects that are reachable from one loader."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._held: dict[str, _Attribute] = {}
        self.find_generators()
        values = {path: held.value() for path, held in self._held.items()}
        self._at_first = frozenset(values)
        self._numbers = {path: value for path, value in values.items() if _kind_of(value) is None}

    def find_generators(self) -> None:
        """Search the loader's objects again for random generators and counters, because training may have
        changed them.
        """
        self._held = dict(_attributes(self._loader))

    def state(self) -> State:
        """Return the states of the random generators, and the counters whose values have changed."""
        values = {path: held.value() for path, held in self._held.items()}
        return {
            path: [kind, _GET[kind](value)] if kind else value
            for path, value in values.items()
            if (kind := _kind_of(value)) or self._numbers.get(path) != value
        }

    def set(self, state: Mapping[str, Any]) -> None:
        """Restore the random generators and counters that `state` returned.

        Attributes that did not exist then are removed, and missing generators are created. Raises
        `SnugfitError` on failure.
        """
        self.find_generators()
        for path in self._held.keys() - state.keys():
            if path in self._numbers:
                self._held[path].set(self._numbers[path])
            elif path not in self._at_first:
                self._held[path].remove()
        for path, value in state.items():
            held = self._held.get(path) or _attribute_at(self._loader, path)
            held.set(value)


class _Attribute:
    """An attribute of the user's objects that contains a random generator or a number."""

    def __init__(self, owner: Any, name: str, value: Any = None) -> None:
        self._owner, self._name, self._value = owner, name, value

    def value(self) -> Any:
        return self._value if self._owner is None else vars(self._owner).get(self._name)

    def set(self, state: Any) -> None:
        """Set the state of the random generator in this attribute, or replace the attribute's value."""
        before = self.value()
        if isinstance(state, list) and _kind_of(before) == state[0]:
            _SET[state[0]](before, state[1])
        elif self._owner is not None and before != state:  # the object may be a frozen dataclass
            vars(self._owner)[self._name] = _new_generator(*state) if isinstance(state, list) else state

    def remove(self) -> None:
        """Remove the value of this attribute, such as the result of a `cached_property`."""
        if self._owner is not None:
            vars(self._owner).pop(self._name, None)


def _is_librarys(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in LIBRARIES


def _attribute_at(loader: Any, path: str) -> _Attribute:
    """Return the attribute at a saved path, whose random generator the data creates with its first batch.

    Raises `SnugfitError` if the attribute's object does not exist.
    """
    owner, (*parents, name) = loader, path.split(".")
    for parent in parents:
        owner = next((child for inner, child, _ in _children(owner) if inner == parent), None)
    if not hasattr(owner, "__dict__"):
        raise SnugfitError(
            f"The checkpoint has the state of {path} of the data, which does not exist now. Give the "
            "loader, dataset and collator with which the run started."
        )
    return _Attribute(owner, name)


def _attributes(loader: Any) -> Iterator[tuple[str, _Attribute]]:
    """Yield the path and the attribute of each random generator or counter that is reachable from a loader,
    the nearest first.
    """
    waiting: list[tuple[str, Any, int]] = [("", loader, 0)]
    visited: set[int] = set()
    while waiting and len(visited) < MOST:
        path, value, depth = waiting.pop(0)
        if id(value) in visited or depth > DEEPEST:
            continue
        visited.add(id(value))
        for name, child, owner in _children(value):
            inner = f"{path}.{name}" if path else name
            if _kind_of(child) is not None:
                # Several attribute paths may lead to one generator, which is stored once.
                if id(child) not in visited:
                    visited.add(id(child))
                    yield inner, _Attribute(owner, name, child)
            elif child is None or isinstance(child, bool | int | float):
                # An attribute that is None may become a generator with the first batch.
                if owner is not None and (child is None or not _is_librarys(owner)):
                    yield inner, _Attribute(owner, name, child)
            else:
                waiting.append((inner, child, depth + 1))


def _children(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and value of each attribute or element of a value, and the object that contains it. That
    object is None if the value cannot be replaced.
    """
    import numpy
    import torch

    if isinstance(value, str | bytes | type | types.ModuleType | torch.Tensor | torch.nn.Module):
        return
    if isinstance(value, numpy.ndarray):
        return
    if isinstance(value, dict | list | tuple):
        if len(value) <= LARGEST:
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((str(key), child, None) for key, child in pairs)
        return
    if isinstance(value, functools.partial):
        yield from (("func", value.func, None), ("args", value.args, None), ("kw", value.keywords, None))
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__, None
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents, None
            except ValueError:  # the cell has no value yet
                continue
    else:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            names = [name for name in attributes if not (name.startswith("_") and _is_librarys(value))]
            yield from ((name, attributes[name], value) for name in names)


# ---- kinds of generators ---------------------------------------------------------------------------------


def _kind_of(value: Any) -> str | None:
    if isinstance(value, bool | int | float | str):
        return None
    return next((kind for kind, generator in _kinds().items() if isinstance(value, generator)), None)


@functools.cache
def _kinds() -> dict[str, type[Any]]:
    import numpy
    import torch

    return {
        "torch": torch.Generator,
        "python": random.Random,
        "numpy": numpy.random.Generator,
        "numpy.RandomState": numpy.random.RandomState,
    }


def _plain(value: Any) -> Any:
    """Return the state of a numpy random generator, with its arrays as lists."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


_GET: dict[str, Callable[[Any], Any]] = {
    "torch": lambda generator: generator.get_state().tolist(),
    "python": lambda generator: generator.getstate(),
    "numpy": lambda generator: _plain(generator.bit_generator.state),
    "numpy.RandomState": lambda generator: _plain(generator.get_state(legacy=False)),
}
_SET: dict[str, Callable[[Any, Any], None]] = {
    # `new_tensor` has the dtype (uint8) that torch requires of a state.
    "torch": lambda generator, state: generator.set_state(generator.get_state().new_tensor(state)),
    # JSON has changed the inner tuple to a list, while `setstate` requires a tuple.
    "python": lambda generator, state: generator.setstate((state[0], tuple(state[1]), state[2])),
    "numpy": lambda generator, state: setattr(generator.bit_generator, "state", state),
    "numpy.RandomState": lambda generator, state: generator.set_state(state),
}


def _new_generator(kind: str, state: Any) -> Any:
    """Return a new random generator of this class with this state."""
    import numpy

    bits = (getattr(numpy.random, state["bit_generator"])(),) if kind == "numpy" else ()
    generator = _kinds()[kind](*bits)
    _SET[kind](generator, state)
    return generator
