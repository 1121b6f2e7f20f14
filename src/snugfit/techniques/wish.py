"""Fields that features add to `Setup`.

A feature is a folder of `features/`. Its fields are the `Wish` objects of its module `fields.py`, if there is
one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, cast, get_args

from snugfit.feature_folders import FeatureError, feature_objects

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Call:
    """A callable as data: its import path and keyword arguments."""

    path: str
    """Import path of a function or class: `package.module:name`."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments, JSON values only."""

    def resolve(self) -> Callable[..., Any]:
        """Import and return the callable that `path` names."""
        module, _, name = self.path.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function

    def run(self, *given: Any, **more: Any) -> Any:
        """Import and call the function, and return its result; its own `arguments` override `more`."""
        # The arguments of this call come from the recipe, so they override those of the loop.
        return self.resolve()(*given, **{**more, **self.arguments})


class Lowering(Protocol):
    """Interface for a field of `Setup` under which compiled programs, as of torch.compile, replace the
    model's code.
    """

    @property
    def is_one_program(self) -> bool:
        """True if one compiled program replaces the whole model; otherwise each layer has its own."""

    @property
    def records_graphs(self) -> bool:
        """True if compiled programs are recorded as CUDA graphs and replayed."""

    @property
    def has_budget(self) -> bool:
        """True if compiled programs save less for their backward pass than they do by default."""


class SeveralProcesses:
    """Base class of fields that train one model in several processes, one for each GPU."""

    ranks: int
    """Number of processes that train one model, one for each GPU."""
    on_host: bool = False
    """True if host memory has the shards and the CPU updates them. Processes then exchange data in host
    memory too.
    """

    @property
    def matrix_parts(self) -> int:
        """Return the number of shards of each weight matrix, which determines the optimizer's groups."""
        return 1

    @property
    def axes(self) -> Mapping[str, int]:
        """Return the number of ranks by axis, such as tensor or pipeline, along which ranks share the same
        samples."""
        return {}

    @property
    def data_ranks(self) -> int:
        """Return the number of ranks that get different samples, into which the global batch is divided."""
        return self.ranks

    def data_rank(self, rank: int) -> int:
        """Return the index, from 0, of a rank's part of the global batch."""
        return rank

    def counts(self, rank: int) -> float:
        """Return the weight, from 0 to 1, of this rank's loss in the sum of losses over all ranks."""
        return 1.0

    def on(self, gpus: int) -> SeveralProcesses:
        """Return these settings for `gpus` GPUs. Raises `UsageError` if these GPUs cannot divide the model or
        the batch.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Wish(Generic[T]):
    """A field that a feature adds to the training settings (`Setup`), with its slot (a choice of the recipe)
    and default.
    """

    name: str
    """Name of the field in `Setup` and in its JSON."""
    kind: Any
    """Type of the field's value, which can be compared and written as JSON."""
    default: T
    """Value of the field in the plain loop."""
    touches: tuple[str, ...] = ("passes", "update")
    """Names of the parts of a step that the field changes: fields of `StepKey` (`planning/step_key.py`)."""

    lowers: bool = False
    """True if the field's value is a `Lowering` (setting of a compiler) or None."""
    adamw: Call | None = None
    """Function that returns the `OptimizerWish` of AdamW under this field; None leaves AdamW unchanged."""
    parts: Call | None = None
    """Class that simulates the parts of a step under this field (`rehearsal/step_parts.py`); None for the
    class of a plain step.
    """

    records_graphs: bool = False
    """True if the field records steps as CUDA graphs. The first steps then differ from later ones."""
    draws_once: bool = False
    """True if a step with the field cannot draw the same random numbers again for recomputed layers."""
    freezes: bool = False
    """True if the field freezes the model's weights and adds trainable fp32 weights."""
    selects: bool = False
    """True if the field selects the trainable weights among the model's."""
    packages: tuple[str, ...] = ()
    """Packages that a step with the field imports."""
    needs_no_compiler: bool = False
    """True if no step with the field uses a module whose import is deferred (`deferred_imports.py`)."""
    seeded_models: tuple[str, ...] = ()
    """Types of models in which the field seeds all dropout except attention's. A recomputed layer then drops
    the same elements.
    """

    def of(self, setup: Any) -> T:
        """Return the value of this field in a `Setup` (training settings)."""
        return cast(T, getattr(setup, self.name))


@functools.cache
def wishes() -> tuple[Wish[Any], ...]:
    """Return the fields of `Setup` that all features add. Raises `FeatureError` if two fields have the same
    name.
    """
    fields = feature_objects("fields", Wish)
    # The fields form one dataclass, where a second name would replace the first.
    names = [wish.name for wish in fields]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise FeatureError(f"Two features add the same fields to Setup: {', '.join(twice)}. Rename one.")
    return tuple(fields)


@functools.cache
def lowering_wishes() -> tuple[Wish[Lowering | None], ...]:
    """Return the features' fields of `Setup` whose values describe a compiler (`Lowering`), or are None."""
    return tuple(wish for wish in wishes() if wish.lowers)


def _wishes_of_processes() -> tuple[Wish[Any], ...]:
    return tuple(
        wish
        for wish in wishes()
        # The value is None or `SeveralProcesses`, so the alternatives of the annotation are searched.
        if any(isinstance(kind, type) and issubclass(kind, SeveralProcesses) for kind in get_args(wish.kind))
    )


def wish_of_processes(setup: Any) -> Wish[Any] | None:
    """Return the field of these settings (`Setup`) with which several processes train one model; None if no
    field has.
    """
    return next((wish for wish in _wishes_of_processes() if wish.of(setup) is not None), None)


def processes_of(setup: Any) -> SeveralProcesses | None:
    """Return the value of the field with which several processes train one model; None for one process."""
    wish = wish_of_processes(setup)
    return None if wish is None else wish.of(setup)


def used_wishes(setup: Any) -> list[Wish[Any]]:
    """Return the features' fields of `Setup` whose values in these settings differ from the plain loop's."""
    return [wish for wish in wishes() if wish.of(setup) != wish.default]
