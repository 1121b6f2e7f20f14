"""Keys by which a search knows that two recipes share a part of their step.

A recipe's Setup decides everything about its step, and most recipes of a space share most of it: the same
passes with another optimizer, the same trace with another loader. `StepKey` sorts a Setup's fields by the
parts of a step that they change (`TOUCHES`), so that what is shared is rehearsed once.

The fields come from the Setup itself. One that the table does not know touches passes and update alike: a new
wish may cost a search some time until it has a row here, and never gives two recipes one trace by mistake.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from operator import is_
from typing import Any, NamedTuple

from snugfit.techniques.setup import LoaderWish, OptimizerWish, Setup
from snugfit.techniques.wish import wishes


class StepKey(NamedTuple):
    """All of a Setup that its trace, its allocator and its seconds depend on.

    The order makes what recipes share a beginning of it: the first is the kind of passes, the first two are
    passes of one size, the first three are one trace.
    """

    passes: tuple[Hashable, ...]
    """What forward and backward of a micro-batch do, whatever its size."""
    micro_batches: tuple[Hashable, ...]
    """How often they run, and on how many samples."""
    update: tuple[Hashable, ...]
    """What the optimizer's step does."""
    matmul: tuple[Hashable, ...]
    """What products of fp32 matrices are computed in: no allocation and no kernel, only seconds."""
    loader: tuple[Hashable, ...]
    """Who makes the batches: only seconds."""
    launches: tuple[Hashable, ...]
    """Whether kernels are launched one by one: of the passes, only seconds and which memory they lie in."""
    allocator: tuple[Hashable, ...]
    """How the allocator takes its segments: only what it reserves."""


TOUCHES: Mapping[str, tuple[str, ...]] = {
    "weights_dtype": ("passes", "update"),
    "attention": ("passes",),
    "matmul": ("matmul",),
    "masters": ("passes", "update"),
    "logits": ("passes",),
    "checkpoint": ("passes",),
    "compile": ("passes",),
    "capture": ("update", "launches"),
    "optimizer": ("update",),
    "autocast": ("passes",),
    "scale_gradients": ("passes", "update"),
    "micro_batches": ("micro_batches",),
    "release": ("passes", "update"),
    "sharding": ("passes", "update"),
    "parallel": ("passes", "update"),
    "loader": ("loader",),
    "expandable_segments": ("allocator",),
    **{wish.name: wish.touches for wish in wishes()},
}
"""The parts of a step that a field of a Setup changes."""

UNKNOWN = ("passes", "update")
"""What a field without a row is taken to change."""

WITHOUT_EFFECT = {(OptimizerWish, "trainer_name"), (LoaderWish, "pinned")}
"""Fields of wishes that change nothing of a predicted step."""

SIMPLE = {str, int, float, bool, type(None)}
"""Values that stand in a key as they are."""

REMEMBERED_WISHES = 10_000
"""Wishes whose keys are kept: more than a space has."""


def step_key(setup: Setup) -> StepKey:
    """This Setup's key; equal for two Setups that nothing of a step tells apart."""
    return StepKey(*[_values(setup, part) for part in StepKey._fields])


def trace_key(setup: Setup) -> tuple[Hashable, Hashable, Hashable]:
    """Return the first three parts of this Setup's key, equal for two Setups that have one trace."""
    return _values(setup, "passes"), _values(setup, "micro_batches"), _values(setup, "update")


def passes_key(setup: Setup) -> Hashable:
    """All of a Setup that its passes depend on, but for the size of a micro-batch."""
    return _values(setup, "passes")


def program_key(setup: Setup) -> Hashable:
    """Return all of a Setup that its compiled layers depend on; None where it has none."""
    if setup.compile is None:
        return None
    saving_nothing = setup.with_fields(checkpoint=None, logits=None)
    return _values(saving_nothing, "passes"), _values(setup, "micro_batches")


def update_key(setup: Setup) -> Hashable:
    """All of a Setup that its update depends on."""
    return _values(setup, "update")


def timing_key(setup: Setup) -> Hashable:
    """All of a Setup that its seconds depend on beside its trace."""
    return _values(setup, "matmul"), _values(setup, "loader"), _values(setup, "launches")


def adapters_key(setup: Setup) -> Hashable:
    """All of a Setup that decides which parameters train."""
    return tuple([_hashable(wish.of(setup)) for wish in wishes() if wish.freezes])


def as_rehearsed(setup: Setup) -> Setup:
    """Of all Setups with this trace, the one that is rehearsed: what the trace does not show is plain."""
    plain, names = type(setup)(), _names_by_part(setup)
    hidden = (*names["matmul"], *names["loader"], *names["allocator"])
    return replace(setup, **{name: getattr(plain, name) for name in hidden})


def as_written(setup: Setup, *, padded: bool) -> Setup:
    """The same, without what the passes of a step do not show: whether the step is recorded as CUDA graphs.
    What is played back is what is written; of `padded` batches, what is written for it."""
    plain = as_rehearsed(setup)
    if plain.capture is None:
        return plain
    return replace(plain, capture=replace(plain.capture, recorded=False) if padded else None)


def _values(setup: Setup, part: str) -> tuple[Hashable, ...]:
    """What this part of a step depends on. Setups that come one after the other in a space share most of
    their wishes, so the last answer for each part is kept."""
    values = [getattr(setup, name) for name in _names_by_part(setup)[part]]
    if part == "passes" and setup.capture is not None and not setup.capture.recorded:
        values.append(setup.capture)
    last = _LAST.get(part)
    if last is None or len(last[0]) != len(values) or not all(map(is_, last[0], values)):
        key = tuple([value if value.__class__ in SIMPLE else _hashable(value) for value in values])
        last = _LAST[part] = values, key
    return last[1]


_LAST: dict[str, tuple[list[Any], tuple[Hashable, ...]]] = {}


def _names_by_part(setup: Any) -> Mapping[str, tuple[str, ...]]:
    return _sorted_fields(setup.__class__)


@cache
def _sorted_fields(kind: Any) -> Mapping[str, tuple[str, ...]]:
    """By the part of a step, the fields of a Setup that touch it."""
    return {
        part: tuple(field.name for field in fields(kind) if part in TOUCHES.get(field.name, UNKNOWN))
        for part in StepKey._fields
    }


def _hashable(value: Any) -> Hashable:
    """A wish as something that can be hashed. Recipes share wishes, so each is looked into once."""
    known = _WISHES.get(id(value))
    if known is None:
        if len(_WISHES) >= REMEMBERED_WISHES:
            _WISHES.clear()
        known = _WISHES[id(value)] = value, _content(value)
    return known[1]


_WISHES: dict[int, tuple[Any, Hashable]] = {}  # by id, with the wish that it is the id of


def _content(value: Any) -> Hashable:
    if isinstance(value, Mapping):
        return repr(sorted(value.items()))
    if not is_dataclass(value):
        return repr(value)
    values = [getattr(value, name) for name in _fields_with_effect(value.__class__)]
    return tuple([value if value.__class__ in SIMPLE else _content(value) for value in values])


@cache
def _fields_with_effect(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if (kind, field.name) not in WITHOUT_EFFECT)
