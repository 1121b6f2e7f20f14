"""Of a technique with many grades the one that is just enough, where a faster recipe lacks some bytes.

Recomputing the first k layers has as many settings as a model has layers, each with passes of its own that
are rehearsed at the whole depth. So they are no part of the space. They lie between keeping all and
recomputing each layer, in bytes and in seconds. Once the fastest recipe of the space that fits is known, a
few of those that keep all, do not fit, and may be faster on the line to each layer, get the least grade that
fits: looked for on that line, from both sides, in some two to six rehearsals. Of those that may be as fast
the simplest is taken, and the allocator's kinds of segments are both tried, since a grade's trace is the same
for both. That is no exact search: what the line says of a recipe may be wrong.

Of the layers that have to go, some may wait on the host instead: those whose copies are done beside all that
is computed anyway cost nothing. How many these are follows from the line as well, and from the link
(`mixture.py`). Where that makes a step faster by more than would be called as fast, such a mixture is
rehearsed, and first: where it fits, the least grade is mostly no longer worth looking for.

Of kernels, layers whose largest product is computed again are looked for likewise, between none of them and
all (`Technique.smaller`): a part of a layer costs fewer seconds for a byte than the whole of it.

A technique that is kept for all layers, as `host(all)`, is looked for with fewer of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from snugfit.errors import SnugfitError
from snugfit.planning.cost.figures import Bound, Figures
from snugfit.planning.search.mixture import Mixture, RecomputingLine, Tried, find_mixture, mixture_of
from snugfit.planning.search.simpler import AS_FAST
from snugfit.planning.search.space import Candidate, Space
from snugfit.planning.step_key import step_key
from snugfit.prediction.worker_pool import Question, WorkerPool
from snugfit.techniques import roster
from snugfit.techniques.setup import EVERY_LAYER, Setup
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.planning.search.progress import Tell
    from snugfit.planning.search.state import SearchState
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.technique import Technique

RECIPES = 3
"""Recipes that get a grade, one after the other, the fastest on the line first."""

SMALLER_RECIPES = 2
"""Recipes of which smaller settings of one technique are rehearsed, the fastest first."""

KEPT_RECIPES = 2
"""Of those that fit with what is kept for all layers, the fastest, which are looked at with fewer."""

ROUNDS = 4
"""Times that grades of one recipe are rehearsed, two at a time."""

NEVER_SEEN = 0.25
"""Of a step's seconds, what recomputing each layer adds where nothing is known of it: a forward pass is a
third of a step's products."""


class _Between(NamedTuple):
    """A recipe that keeps all and does not fit, and what is known of it with each layer recomputed."""

    number: int
    needed_bytes: int
    seconds: float
    least_bytes: int
    most_seconds: float

    def share(self, memory_bytes: int) -> float:
        """How far on the line to each layer it fits."""
        return (self.needed_bytes - memory_bytes) / max(1, self.needed_bytes - self.least_bytes)

    def layers_within(self, memory_bytes: int, layers: int) -> int:
        """How many of so many layers have to go."""
        return min(max(1, math.ceil(self.share(memory_bytes) * layers)), layers)

    def seconds_within(self, memory_bytes: int) -> float:
        """What it takes there."""
        return self.seconds + self.share(memory_bytes) * (self.most_seconds - self.seconds)


def find_grades(
    state: SearchState, pool: WorkerPool, job: Job, tell: Tell, link: float | None = None
) -> Space:
    """Judges the least grades that fit and are faster than all that was judged and fits, and adds them to the
    state's space, which it gives back. None where nothing fits. `link` is how many bytes a second go to the
    host; where that is not known, nothing is sent there unasked."""
    if state.memory_bytes is None or state.nothing_fits or not job.trains:
        return state.space
    fixed = state.space.fixed.slots
    mixture = None if Slot.ACTIVATION_OFFLOAD in fixed else mixture_of(job, link)
    for technique in roster.techniques():
        grades = technique.grades(job)
        if not grades or technique.slot is not Slot.CHECKPOINTING or technique.slot in fixed:
            continue
        tried = set[int]()
        for _ in range(RECIPES):
            between = _most_promising(state, technique.slot, tried)
            if between is None:
                break
            tried.add(state.space.candidates[between.number].sized)
            tell(f"looking for {technique.name} that fits")
            if mixture is not None:  # which mostly makes the other needless
                _look_for_mixture(state, pool, between, mixture)
            if between.seconds_within(state.memory_bytes) >= state.fastest_that_fits * (1 - AS_FAST):
                continue
            if least_grade := _least_that_fits(state, pool, between, grades):
                add_candidate(state, *least_grade)
    for slot in Slot:
        if slot not in fixed:
            _find_smaller(state, pool, job, slot, tell)
    for slot, (whole, *_) in fixed.items():
        if lesser := whole.lesser(job):
            tell(f"looking for the fewest layers of {whole}")
            _find_lesser(state, pool, slot, lesser)
    return state.space


def _look_for_mixture(state: SearchState, pool: WorkerPool, between: _Between, mixture: Mixture) -> None:
    """Judges recipes with some of their layers on the host that may be faster than all that fits, and than
    recomputing as few layers as fit, and adds those that are."""
    memory = state.memory_bytes or 0

    def look(recipe: Recipe) -> Tried | None:
        judged = judge_recipe(state, pool, recipe)
        if judged is None:
            return None
        lacking = judged[1].needed_bytes - memory
        if lacking <= 0 and judged[1].seconds < state.fastest_that_fits:
            add_candidate(state, *judged)
        return Tried(judged[0], lacking, judged[1].seconds)

    base = state.space.candidates[between.number].recipe
    gone = between.layers_within(memory, mixture.layers)
    most = min(state.fastest_that_fits, between.seconds_within(memory))
    find_mixture(mixture, RecomputingLine(*between[1:]), base, gone, most, look)


def _find_smaller(state: SearchState, pool: WorkerPool, job: Job, slot: Slot, tell: Tell) -> None:
    """Judges the fastest recipes that keep all and do not fit with smaller settings of what is in this slot,
    and adds those that fit and are faster than all that does."""
    smaller = {technique: technique.smaller(job) for technique in state.space.offers(slot)}
    if not any(smaller.values()):
        return
    tried = set[int]()
    for _ in range(SMALLER_RECIPES):
        number = _fastest_too_large(state, slot, smaller, tried)
        if number is None:
            return
        tried.add(state.space.candidates[number].sized)
        base = state.space.candidates[number].recipe
        *settings, last = smaller[base[slot]]
        tell(f"looking for {last.name} with as few layers as fit")
        least = judge_recipe(state, pool, base.with_(last))
        if least is None or not state.fits(least[1].needed_bytes):
            continue
        known = state.judged.get(number) or state.bounds[number]
        between = _Between(number, known.needed_bytes, known.seconds, least[1].needed_bytes, least[1].seconds)
        enough = _least_that_fits(state, pool, between, settings) or least
        if enough[1].seconds < state.fastest_that_fits:
            add_candidate(state, *enough)


def _fastest_too_large(
    state: SearchState, slot: Slot, smaller: Mapping[Technique, Sequence[Technique]], tried: Collection[int]
) -> int | None:
    """Of the recipes that recompute no layer, do not fit, and may be faster than all that fits, the fastest,
    with other passes than those `tried`, whose technique in this slot has `smaller` settings."""
    most, plain = state.fastest_that_fits * (1 - AS_FAST), roster.plain(Slot.CHECKPOINTING)
    seconds: dict[int, float] = {}
    for number, bound in state.bounds.items():
        candidate, known = state.space.candidates[number], state.judged.get(number) or bound
        of_slot = smaller.get(candidate.recipe[slot])
        if not of_slot or candidate.recipe[Slot.CHECKPOINTING] != plain or candidate.sized in tried:
            continue
        if known.seconds < most and not state.fits(known.needed_bytes):
            seconds[number] = known.seconds
    return min(seconds, key=lambda number: (seconds[number], number), default=None)


def _find_lesser(state: SearchState, pool: WorkerPool, slot: Slot, lesser: Sequence[Technique]) -> None:
    """Judges the fastest recipes that fit with the least of these in place of what is kept, and adds those
    that are faster."""
    fitting = [number for number in state.front() if state.fits(state.judged[number].needed_bytes)]
    for number in fitting[:KEPT_RECIPES]:
        base = state.space.candidates[number].recipe
        low, high = 0, len(lesser) + 1  # the most that does not fit, and the least that does
        for _ in range(2 * ROUNDS):
            if high - low <= 1:
                break
            middle = (low + high) // 2
            judged = judge_recipe(state, pool, base.with_(lesser[middle - 1]))
            if judged is None:
                break
            if state.fits(judged[1].needed_bytes):
                high = middle
                if judged[1].seconds < state.fastest_that_fits:
                    add_candidate(state, *judged)
            else:
                low = middle


def _most_promising(state: SearchState, slot: Slot, tried: set[int]) -> _Between | None:
    """Of the recipes with other passes than those `tried`, the simplest that may be as fast as the fastest
    on the line, if that is faster than all that fits."""
    space, memory = state.space, state.memory_bytes or 0
    most = state.fastest_that_fits * (1 - AS_FAST)
    lines = [
        line
        for line in _lines(state, slot)
        if line.seconds_within(memory) < most and space.candidates[line.number].sized not in tried
    ]
    least = min((line.seconds_within(memory) for line in lines), default=math.inf)
    as_fast = [line for line in lines if line.seconds_within(memory) <= least * (1 + AS_FAST)]
    return min(
        as_fast,
        key=lambda line: (space.changes(space.candidates[line.number].recipe), line.seconds_within(memory)),
        default=None,
    )


def _lines(state: SearchState, slot: Slot) -> Iterator[_Between]:
    """What keeps all and does not fit, but may with each layer recomputed."""
    space, plain = state.space, roster.plain(slot)
    every = next((one for one in space.offers(slot) if one.install(Setup()).checkpoint == EVERY_LAYER), None)
    for number, bound in state.bounds.items():
        known = state.judged.get(number) or bound
        is_plain = space.candidates[number].recipe[slot] == plain
        if not is_plain or state.fits(known.needed_bytes) or every is None:
            continue
        other = space.variant(number, every)
        if other is None:
            continue
        full = state.judged.get(other) or state.bounds.get(other)
        least = full.needed_bytes if full else bound.resting_bytes
        if state.fits(least):
            most = max(full.seconds, known.seconds) if full else known.seconds * (1 + NEVER_SEEN)
            yield _Between(number, known.needed_bytes, known.seconds, least, most)


def _least_that_fits(
    state: SearchState, pool: WorkerPool, between: _Between, grades: Sequence[Technique]
) -> tuple[Recipe, Figures] | None:
    """The first of these grades with which the recipe fits, and what it takes; None where that was not
    found or is no faster than what fits anyway."""
    low, high = 0, len(grades) + 1  # grades that do not fit, and that do; 0 keeps all, and the last is each
    low_bytes, high_bytes = between.needed_bytes, between.least_bytes
    least_grade: tuple[Recipe, Figures] | None = None
    base, memory = state.space.candidates[between.number].recipe, state.memory_bytes or 0
    for _ in range(ROUNDS):
        if high - low <= 1:
            break
        share = (low_bytes - memory) / max(1, low_bytes - high_bytes)
        guess = min(max(low + math.ceil(share * (high - low)), low + 1), high - 1)
        for grade in sorted({guess, max(guess - 1, low + 1)}):
            judged = judge_recipe(state, pool, base.with_(grades[grade - 1]))
            if judged is None:
                return least_grade
            _, figures = judged
            if state.fits(figures.needed_bytes):
                high, high_bytes, least_grade = grade, figures.needed_bytes, judged
                break
            low, low_bytes = grade, figures.needed_bytes
            if figures.seconds >= state.fastest_that_fits:
                return None
    return least_grade if least_grade and least_grade[1].seconds < state.fastest_that_fits else None


def judge_recipe(state: SearchState, pool: WorkerPool, recipe: Recipe) -> tuple[Recipe, Figures] | None:
    """What a recipe takes by the simplest allocator with which it fits, or the one that needs the fewest
    bytes; None where it cannot be rehearsed."""
    space = state.space
    allocators = sorted(space.offers(Slot.ALLOCATOR), key=lambda one: one != space.simplest[Slot.ALLOCATOR])
    stand_ins = {one: stand_in(space, one) for one in map(recipe.with_, allocators)}
    recipes = [one for one in stand_ins if stand_ins[one] is not None]
    question = Question(stand_ins[recipes[0]] or 0, "judge", ([one.setup() for one in recipes],))
    [(_, answer)] = pool.answers_to([question], lambda worker, one: state.is_for(worker, one.number))
    if isinstance(answer, SnugfitError):
        return None
    judged = [(one, figures) for one, (figures,) in zip(recipes, answer, strict=True)]
    fitting = [one for one in judged if state.fits(one[1].needed_bytes)]
    return fitting[0] if fitting else min(judged, key=lambda one: one[1].needed_bytes)


def add_candidate(state: SearchState, recipe: Recipe, figures: Figures | None = None) -> None:
    """Makes this recipe one of the space's, with what it takes where that is known."""
    space, setup, number = state.space, recipe.setup(), len(state.space.candidates)
    update, own, like = step_key(setup).update, -number, stand_in(space, recipe)
    program = own if like is None else space.candidates[like].program
    new = Candidate(
        recipe=recipe, setup=setup, update=update, passes=own, sized=own, program=program, trace=own
    )
    state.space = replace(space, candidates=(*space.candidates, new), graded={**space.graded, recipe: number})
    if figures is None:
        state.bounds[number] = Bound(0, 0.0)
    else:
        state.bounds[number] = Bound(figures.needed_bytes, figures.seconds)
        state.learn(number, figures)


def stand_in(space: Space, recipe: Recipe) -> int | None:
    """Of a recipe with a grade, the same with the slot's plain technique, or with what is kept there; its own
    number for any other. None where that is not in the space."""
    for technique in recipe:
        if technique not in space.offers(technique.slot):
            plain, offered = roster.plain(technique.slot), space.offers(technique.slot)
            recipe = recipe.with_(plain if plain in offered else offered[0])
    return space.number(recipe)
