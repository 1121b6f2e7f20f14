"""Fields that features add to `Setup`.

A feature is a folder of `features/`. Its fields are the `Wish` objects of its module `fields.py`, if there is
one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from snugfit.feature_folders import FeatureError, feature_objects

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Call:
    """A callable by its import path, with keyword arguments: code as data."""

    path: str
    """The import path, `package.module:name`."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments, JSON values only."""

    def resolve(self) -> Callable[..., Any]:
        """Import and return the callable that `path` names."""
        module, _, name = self.path.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function

    def run(self, *given: Any, **more: Any) -> Any:
        """Call the function and return its result; its own arguments override `more`."""
        return self.resolve()(*given, **{**more, **self.arguments})


@dataclass(frozen=True)
class Wish(Generic[T]):
    """A field of `Setup` that a feature adds."""

    name: str
    """The field's name, in `Setup` and in its JSON."""
    kind: Any
    """Its type, of a value that can be compared and written as JSON."""
    default: T
    """The value of the plain loop."""
    touches: tuple[str, ...] = ("passes", "update")
    """Parts of a step that the field changes, by the fields of `StepKey` (`planning/step_key.py`)."""

    adamw: Call | None = None
    """Function that returns the `OptimizerWish` of AdamW with it; None leaves AdamW as it is."""
    parts: Call | None = None
    """Class of a step's rehearsed parts (`rehearsal/step_parts.py`); None for those of a plain step."""

    records_graphs: bool = False
    """True if the loop's steps are recorded as CUDA graphs, so that the first steps differ from later ones.
    """
    draws_once: bool = False
    """True if a step cannot draw the same random numbers again in recomputed layers."""
    freezes: bool = False
    """True if it freezes the model's weights and adds others, in fp32, that train."""
    packages: tuple[str, ...] = ()
    """Packages that a step with it imports."""
    seeded_models: tuple[str, ...] = ()
    """Types of models in which it seeds all dropout but attention's: a recomputed layer then drops the same
    elements.
    """

    def of(self, setup: Any) -> T:
        """Return the value in this `Setup`."""
        return cast(T, getattr(setup, self.name))


@functools.cache
def wishes() -> tuple[Wish[Any], ...]:
    """Return the fields that all features add. Raises `FeatureError` where two have one name."""
    fields = feature_objects("fields", Wish)
    names = [wish.name for wish in fields]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise FeatureError(f"Two features add the same fields to Setup: {', '.join(twice)}.")
    return tuple(fields)


def used_wishes(setup: Any) -> list[Wish[Any]]:
    """Return the fields of features that differ from the plain loop's in this `Setup`."""
    return [wish for wish in wishes() if wish.of(setup) != wish.default]
