"""Cache keys that are equal for recipes with the same passes, update, trace or seconds, so that each is
simulated once.

A recipe's `Setup` (its training settings) determines its whole step. Most recipes of a search share most
settings. For example, recipes with other optimizers share the forward and backward passes. `StepKey` sorts a
Setup's fields by the parts of a step that they change (`TOUCHES`). Each shared part is thus simulated once.

A field without a row in `TOUCHES` counts as changing passes and update. So a new field without a row may slow
a search down, but two recipes never share a trace by mistake.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from operator import is_
from typing import Any, NamedTuple

from snugfit.rehearsal.step_parts import parts_of
from snugfit.techniques.setup import LoaderWish, OptimizerWish, Setup
from snugfit.techniques.wish import wishes


class StepKey(NamedTuple):
    """Cache key of a step: the fields of a Setup that determine its trace, its allocator and its seconds.

    Keys with shared parts have a common prefix. The first part identifies forward and backward for any
    micro-batch size. The first two include the size, and the first three identify the trace.
    """

    passes: tuple[Hashable, ...]
    """Values of the fields that determine forward and backward of a micro-batch, regardless of its size."""
    micro_batches: tuple[Hashable, ...]
    """Number of micro-batches in a step, which determines their size."""
    update: tuple[Hashable, ...]
    """Values of the fields that determine the optimizer update."""
    matmul: tuple[Hashable, ...]
    """Precision of fp32 matrix products (TF32 or IEEE). It changes seconds, but neither allocations nor the
    list of kernels."""
    loader: tuple[Hashable, ...]
    """Settings of the data loader. They change seconds only."""
    launches: tuple[Hashable, ...]
    """Values of the fields that determine if kernels are launched one by one or as CUDA graphs. In forward
    and backward it changes only seconds and the memory pool.
    """
    allocator: tuple[Hashable, ...]
    """Use of the allocator's expandable segments, which changes reserved bytes only."""


TOUCHES: Mapping[str, tuple[str, ...]] = {
    "weights_dtype": ("passes", "update"),
    "attention": ("passes",),
    "matmul": ("matmul",),
    "logits": ("passes",),
    "checkpoint": ("passes",),
    "optimizer": ("update",),
    "autocast": ("passes",),
    "scale_gradients": ("passes", "update"),
    "micro_batches": ("micro_batches",),
    "loader": ("loader",),
    "expandable_segments": ("allocator",),
    **{wish.name: wish.touches for wish in wishes()},
}
"""Names of the parts of a step (`StepKey`) that each field of the training settings (`Setup`) changes."""

UNKNOWN = ("passes", "update")
"""Names of the parts of a step that a field without an entry in `TOUCHES` is assumed to change."""

IGNORED_FIELDS = {(OptimizerWish, "trainer_name"), (LoaderWish, "pinned")}
"""Fields of setting classes, as (class, field), that do not change a predicted step."""

SIMPLE = {str, int, float, bool, type(None)}
"""Types of setting values that become part of a cache key unchanged."""

_PLAIN = Setup()

CACHED_VALUES = 10_000
"""Largest number of values of `Setup` fields whose keys are cached. One search has fewer."""


def step_key(setup: Setup) -> StepKey:
    """Return this Setup's key, equal for two Setups with identical steps."""
    return StepKey(*[_values(setup, part) for part in StepKey._fields])


def trace_key(setup: Setup) -> tuple[Hashable, Hashable, Hashable]:
    """Return the first three components of this Setup's key, equal for two Setups with the same trace."""
    return _values(setup, "passes"), _values(setup, "micro_batches"), _values(setup, "update")


def passes_key(setup: Setup) -> Hashable:
    """Return the fields of a Setup that determine its forward and backward passes, except for the size of a
    micro-batch.
    """
    return _values(setup, "passes")


def program_key(setup: Setup) -> Hashable:
    """Return the fields of a Setup that determine its compiled layers; None if it compiles none."""
    if setup.lowering is None:
        return None
    # Recomputed layers and chunked logits run the same compiled programs.
    return _values(setup.without_savings(), "passes"), _values(setup, "micro_batches")


def update_key(setup: Setup) -> Hashable:
    """Return the fields of a Setup that determine its optimizer update."""
    return _values(setup, "update")


def timing_key(setup: Setup) -> Hashable:
    """Return the fields of a Setup that determine its seconds in addition to its trace."""
    return _values(setup, "matmul"), _values(setup, "loader"), _values(setup, "launches")


def adapters_key(setup: Setup) -> Hashable:
    """Return the fields of a Setup that determine the trainable parameters."""
    return tuple([_hashable(wish.of(setup)) for wish in wishes() if wish.freezes or wish.selects])


def as_rehearsed(setup: Setup) -> Setup:
    """Return the Setup that is simulated for all Setups with the same trace. Fields without effect on the
    trace have their defaults.
    """
    plain, names = type(setup)(), _names_by_part(setup)
    hidden = (*names["matmul"], *names["loader"], *names["allocator"])
    return replace(setup, **{name: getattr(plain, name) for name in hidden})


def as_written(setup: Setup, *, padded: bool) -> Setup:
    """Return the Setup without CUDA graphs with which the forward and backward passes of `setup` are
    simulated. Batches keep their padding.
    """
    return parts_of(setup).as_written(as_rehearsed(setup), padded=padded)


def with_update_of(setup: Setup, other: Setup) -> Setup:
    """Return `setup` with those fields of `other` that change the optimizer update and not the forward and
    backward passes.
    """
    names = _names_by_part(setup)
    own = [name for name in names["update"] if name not in names["passes"]]
    return setup.with_fields(**{name: getattr(other, name) for name in own})


def launches_key(setup: Setup) -> Hashable:
    """Return the fields of a Setup that determine how the host launches kernels."""
    return _values(setup, "launches")


def launches_otherwise(setup: Setup) -> bool:
    """Return True if a Setup launches kernels otherwise than one by one, for example as CUDA graphs."""
    return launches_key(setup) != launches_key(_PLAIN)


def differ_in_launches(setup: Setup, other: Setup) -> bool:
    """Return True if the Setups differ in the way of launching kernels, and in nothing else."""
    names = _names_by_part(setup)["launches"]
    # A chained comparison: the Setups differ, and are equal once these fields are exchanged.
    return setup != other == setup.with_fields(**{name: getattr(other, name) for name in names})


def _values(setup: Setup, part: str) -> tuple[Hashable, ...]:
    """Return the values of the fields that determine the passes, the update or another component of a step.

    Consecutive Setups of a space share most of their fields, so the last answer for each part is cached.
    """
    values = [getattr(setup, name) for name in _names_by_part(setup)[part]]
    last = _LAST_KEYS.get(part)
    # Identity suffices for a cache and is faster than equality.
    if last is None or len(last[0]) != len(values) or not all(map(is_, last[0], values)):
        key = tuple([value if value.__class__ in SIMPLE else _hashable(value) for value in values])
        last = _LAST_KEYS[part] = values, key
    return last[1]


_LAST_KEYS: dict[str, tuple[list[Any], tuple[Hashable, ...]]] = {}


def _names_by_part(setup: Any) -> Mapping[str, tuple[str, ...]]:
    return _sorted_fields(setup.__class__)


@cache
def _sorted_fields(kind: Any) -> Mapping[str, tuple[str, ...]]:
    """Return the fields of a Setup by the component of a step that they change, such as the update."""
    return {
        part: tuple(field.name for field in fields(kind) if part in TOUCHES.get(field.name, UNKNOWN))
        for part in StepKey._fields
    }


def _hashable(value: Any) -> Hashable:
    """Return a hashable form of a field's value. Recipes share values, so each is converted once."""
    known = _WISHES.get(id(value))
    if known is None:
        if len(_WISHES) >= CACHED_VALUES:
            _WISHES.clear()
        known = _WISHES[id(value)] = value, _content(value)
    return known[1]


_WISHES: dict[int, tuple[Any, Hashable]] = {}  # by id; the entry keeps the value alive


def _content(value: Any) -> Hashable:
    if isinstance(value, Mapping):
        return repr(sorted(value.items()))
    if not is_dataclass(value):
        return repr(value)
    values = [getattr(value, name) for name in _fields_with_effect(value.__class__)]
    return tuple([value if value.__class__ in SIMPLE else _content(value) for value in values])


@cache
def _fields_with_effect(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if (kind, field.name) not in IGNORED_FIELDS)
