"""The space of a plan: every lawful recipe for a job.

Each slot offers what its techniques' own `settings(job)` yield; a recipe takes one of each. What the user's
fidelity, the GPU's age or a missing package rules out is left out before anything is multiplied, and said;
what two techniques object to together is left out recipe by recipe, and counted.

A large space has a hundred thousand recipes that are made of a few dozen techniques. So what many of them
share is worked out once and told apart by a number: which passes a step has, which update, which trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from snugfit.errors import UsageError, did_you_mean
from snugfit.techniques import roster
from snugfit.techniques.recipe import ONLY_TRAINING, Recipe
from snugfit.techniques.setup import Call, Setup
from snugfit.techniques.technique import Fidelity, Slot, Technique

if TYPE_CHECKING:
    from snugfit.job.job import Job

Capability = tuple[int, int] | None


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """What was not considered, and why."""

    what: str
    """A technique, as a recipe writes it."""

    why: str
    """In words a user can act on."""

    recipes: int = 0
    """How many recipes that ruled out; 0 where they were never put together."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A recipe that may be tried. What recipes share has a number, the same for all that share it."""

    recipe: Recipe
    """The recipe."""

    setup: Setup
    """What it asks of the loop."""

    passes: int
    """Which kind of passes its step has, whatever the size of a micro-batch."""

    sized: int
    """Which kind and size of passes."""

    trace: int
    """Which trace, but for what products are computed in and who makes the batches."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """All that may be tried."""

    candidates: tuple[Candidate, ...]
    """Every lawful recipe."""

    refused: tuple[Refusal, ...]
    """What was left out."""

    choices: tuple[tuple[Technique, ...], ...]
    """What each slot offers."""

    places: Mapping[int, int]
    """Of each candidate its number, by its place among all combinations of the choices."""

    def number(self, recipe: Recipe) -> int | None:
        """The number of the candidate with this recipe; None when it is not in the space."""
        place = 0
        for technique, offered in zip(recipe, self.choices, strict=True):
            if technique not in offered:
                return None
            place = place * len(offered) + offered.index(technique)
        return self.places.get(place)

    def others(self, recipe: Recipe, slot: Slot) -> Iterator[int]:
        """The candidates that differ from this recipe in this slot alone."""
        for technique in self.choices[list(Slot).index(slot)]:
            number = self.number(recipe.with_(technique))
            if technique != recipe[slot] and number is not None:
                yield number


def fidelity_of(text: str | Fidelity) -> Fidelity:
    """The degree that is called so; raises `UsageError` with the legal ones."""
    legal = [degree.value for degree in Fidelity]
    if text not in legal:
        raise UsageError(
            f"Unknown fidelity {text!r}.{did_you_mean(str(text), legal)} It is one of {', '.join(legal)}."
        )
    return Fidelity(text)


def space_of(
    job: Job,
    *,
    fidelity: Fidelity = Fidelity.ROUNDS,
    capability: Capability = None,
    settled: Mapping[Slot, Technique] = MappingProxyType({}),
) -> Space:
    """Every lawful recipe for this job on such a GPU that is no less exact than `fidelity`; what is `settled`
    is not searched, however exact it is."""
    refused: list[Refusal] = []
    choices = tuple(
        (settled[slot],) if slot in settled else tuple(_choices(slot, job, fidelity, capability, refused))
        for slot in Slot
    )
    candidates: list[Candidate] = []
    numbers: tuple[dict[Hashable, int], ...] = ({}, {}, {})
    objections: Counter[tuple[str, str]] = Counter()
    places: dict[int, int] = {}
    for place, (techniques, setup) in enumerate(_combined(choices, Setup())):
        recipe = Recipe(techniques)
        if objected := _objection(recipe, job):
            objections[objected] += 1
            continue
        places[place] = len(candidates)
        asked = trace_key(setup)
        passes, update = _of_passes(asked), _of_update(asked)
        keys = (passes, (passes, setup.micro_batches), (passes, setup.micro_batches, update))
        shared = (seen.setdefault(key, len(seen)) for seen, key in zip(numbers, keys, strict=True))
        first, second, third = shared
        candidates.append(Candidate(recipe=recipe, setup=setup, passes=first, sized=second, trace=third))
    refused += [Refusal(what=what, why=why, recipes=n) for (what, why), n in objections.items()]
    return Space(candidates=tuple(candidates), refused=tuple(refused), choices=choices, places=places)


def not_plain(recipe: Recipe) -> int:
    """How many techniques of a recipe are not their slot's default."""
    return sum(technique != roster.plain(technique.slot) for technique in recipe)


def trace_key(setup: Setup) -> tuple[Any, ...]:
    """All of a Setup that its trace, its allocator and its seconds depend on."""
    wish = setup.optimizer
    optimizer = (_said(wish.factory), _said(wish.prepare), wish.weight_decay, _said(wish.shapes))
    return (
        setup.weights_dtype,
        setup.attention,
        setup.matmul,
        _said(setup.adapt),
        setup.checkpoint,
        optimizer,
        setup.autocast,
        setup.scale_gradients,
        setup.micro_batches,
        setup.expandable_segments,
        setup.loader.workers,
    )


def passes_key(setup: Setup) -> Hashable:
    """All of a Setup that its passes depend on, but for the size of a micro-batch."""
    return _of_passes(trace_key(setup))


def adapters_key(setup: Setup) -> Hashable:
    """All of a Setup that decides which parameters train."""
    said: Hashable = _said(setup.adapt)
    return said


def update_key(setup: Setup) -> Hashable:
    """All of a Setup that its update depends on."""
    return _of_update(trace_key(setup))


def _of_passes(asked: tuple[Any, ...]) -> Hashable:
    weights, attention, _, adapt, checkpoint, _, autocast, scale, _, _, _ = asked
    return weights, attention, adapt, checkpoint, autocast, scale


def _of_update(asked: tuple[Any, ...]) -> Hashable:
    weights, _, _, adapt, _, optimizer, _, scale, _, _, _ = asked
    return weights, adapt, optimizer, scale


def _said(call: Call | None) -> Any:
    return call and (call.path, repr(sorted(call.arguments.items())))


def _choices(
    slot: Slot, job: Job, fidelity: Fidelity, capability: Capability, refused: list[Refusal]
) -> Iterator[Technique]:
    """What this slot offers; tells what it does not."""
    plain = roster.plain(slot)
    if not job.trains and slot in ONLY_TRAINING:
        yield plain
        return
    degrees = list(Fidelity)
    for found in roster.techniques():
        if found.slot is not slot:
            continue
        if why := _ruled_out(found, capability):
            refused.append(Refusal(what=found.name, why=why))
        elif degrees.index(found.fidelity) > degrees.index(fidelity):
            why = {
                Fidelity.ROUNDS: "it rounds differently; --fidelity rounds allows it",
                Fidelity.LEARNS: "it is another algorithm; --fidelity learns allows it",
            }[found.fidelity]
            refused.append(Refusal(what=found.name, why=why))
        else:
            yield from dict.fromkeys(found.settings(job))


def _ruled_out(technique: type[Technique], capability: Capability) -> str | None:
    least = technique.least_capability
    if least and capability and capability < least:
        has = f"{capability[0]}.{capability[1]}"
        return f"it needs compute capability {least[0]}.{least[1]}, and this GPU has {has}"
    return technique.missing_package()


def _combined(
    choices: Sequence[Sequence[Technique]], setup: Setup, chosen: tuple[Technique, ...] = ()
) -> Iterator[tuple[tuple[Technique, ...], Setup]]:
    """One technique of each slot, in every way, with the Setup that they make one after the other."""
    if not choices:
        yield chosen, setup
        return
    for technique in choices[0]:
        yield from _combined(choices[1:], technique.install(setup), (*chosen, technique))


def _objection(recipe: Recipe, job: Job) -> tuple[str, str] | None:
    """Who objects first, and why."""
    for technique in recipe:
        if type(technique).objections is not Technique.objections:
            for text in technique.objections(job, recipe):
                return str(technique), text
    return None
