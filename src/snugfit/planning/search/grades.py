"""Search for the fewest layers to recompute, for fast recipes that need slightly too much memory.

Recomputing the first k layers has one setting per layer of the model. Each has different forward and backward
passes, which are simulated with all layers. These settings are therefore not among the searched recipes.
Their bytes and seconds are between those of keeping all activations and of recomputing each layer.

The search starts from the fastest searched recipe that fits. It considers a few recipes that keep all
activations and do not fit. On the line to recomputing each layer they may be faster. For each it finds the
fewest layers that fit, on that line and from both sides, in two to six simulations. Among equally fast
results it takes the simplest. It tries both kinds of the allocator's segments, since the trace is the same
for both. This search is not exact: the line may be wrong for a recipe.

Activations of some layers may be offloaded to the host instead. Copies that finish during other computation
cost nothing. Their number follows from the line and from the link (`mixture.py`). A mixture that is clearly
faster is simulated first. If it fits, a search for the fewest recomputed layers is mostly not worthwhile.

For kernels, the layers whose largest product is recomputed are searched likewise, from none to all
(`Technique.smaller`). A part of a layer costs fewer seconds per byte than the whole layer.

For a technique that is fixed for all layers, such as `host(all)`, fewer layers are searched.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from snugfit.errors import SnugfitError
from snugfit.planning.cost.figures import Bound, Figures
from snugfit.planning.search.mixture import (
    Mixture,
    MixtureTrial,
    RecomputingLine,
    find_mixture,
    guess_between,
    is_valid,
    mixture_of,
)
from snugfit.planning.search.simpler import AS_FAST
from snugfit.planning.search.space import Candidate, Space
from snugfit.planning.step_key import step_key
from snugfit.prediction.worker_pool import Question, WorkerPool
from snugfit.techniques import roster
from snugfit.techniques.setup import EVERY_LAYER
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.planning.search.progress import Tell
    from snugfit.planning.search.state import SearchState
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.technique import Technique

RECIPES = 3
"""Number of recipes, with the least estimated seconds first, for which the fewest recomputed layers are
searched.
"""

SMALLER_RECIPES = 2
"""Number of recipes for which smaller settings of one technique are simulated, the fastest first."""

KEPT_RECIPES = 2
"""Number of fitting recipes for which fewer layers with the fixed technique are tried, the fastest first."""

ROUNDS = 4
"""Largest number of rounds for one recipe; each simulates up to two numbers of recomputed layers."""

ASSUMED_RECOMPUTE_SHARE = 0.25
"""Assumed share of a step's seconds that the recomputation of each layer adds, if no simulated step shows it.
A forward pass has a third of a step's FLOPs.
"""


class _RecomputedPair(NamedTuple):
    """A recipe that recomputes nothing and does not fit, paired with the same recipe with each layer
    recomputed.
    """

    number: int
    needed_bytes: int
    seconds: float
    least_bytes: int
    most_seconds: float

    def share(self, memory_bytes: int) -> float:
        """Return the fraction of layers, from 0 to 1, whose recomputation should make the recipe fit, by
        linear interpolation.
        """
        return (self.needed_bytes - memory_bytes) / max(1, self.needed_bytes - self.least_bytes)

    def layers_within(self, memory_bytes: int, layers: int) -> int:
        """Return the number of layers, of `layers`, that must be recomputed to fit."""
        return min(max(1, math.ceil(self.share(memory_bytes) * layers)), layers)

    def seconds_within(self, memory_bytes: int) -> float:
        """Return the interpolated seconds of a step in which just enough layers are recomputed to fit."""
        return self.seconds_at(self.share(memory_bytes))

    def seconds_at(self, share: float) -> float:
        """Return the interpolated seconds of a step in which this fraction of the layers is recomputed."""
        return self.seconds + share * (self.most_seconds - self.seconds)


def find_grades(
    state: SearchState, pool: WorkerPool, job: Job, tell: Tell, link: float | None = None
) -> Space:
    """Search the fewest recomputed layers that fit, for recipes that may be faster than all that fit. Return
    the search space with the found recipes added; unchanged if nothing fits.

    `link` is the bandwidth to the host in bytes per second. Without it, activations are offloaded only on
    request.
    """
    if state.memory_bytes is None or state.nothing_fits or not job.trains:
        return state.space
    find_recomputed(state, pool, job, tell, link)
    fixed = state.space.fixed.slots
    for slot in Slot:
        if slot not in fixed:
            _find_smaller(state, pool, job, slot, tell)
    for slot, (whole, *_) in fixed.items():
        if lesser := whole.lesser(job):
            tell(f"searching the fewest recomputed layers of {whole}")
            _find_lesser(state, pool, slot, lesser)
    return state.space


def find_recomputed(
    state: SearchState, pool: WorkerPool, job: Job, tell: Tell, link: float | None = None
) -> None:
    """Simulate the fewest recomputed layers, or parts of layers, of the most promising recipes that do not
    fit. No recipe is tried twice (`SearchState.graded`). `link` is as in `find_grades`.
    """
    slot, fixed = Slot.CHECKPOINTING, state.space.fixed.slots
    if state.memory_bytes is None or state.nothing_fits or not job.trains or slot in fixed:
        return
    mixture = None if Slot.ACTIVATION_OFFLOAD in fixed else mixture_of(job, link)
    kinds = [kind for kind in roster.techniques() if kind.slot is slot and not kind.planning_objection(job)]
    kinds.sort(key=lambda kind: kind.lowered)  # a compiled setting takes the longest to simulate
    graded = {kind: grades for kind in kinds if (grades := kind.grades(job)) and not kind.missing_package()}
    while graded and len(state.graded) < RECIPES:
        between = _most_promising(state, slot, min(kind.grade_cost for kind in graded))
        if between is None:
            break
        # Recipes with the same passes would give the same extrapolation.
        state.graded.add(state.space.candidates[between.number].sized)
        memory, base = state.memory_bytes or 0, state.space.candidates[between.number].recipe

        def may_be_fastest(cost: float, share: float, between: _RecomputedPair = between) -> bool:
            return between.seconds_at(share * cost) < state.fastest_that_fits * (1 - AS_FAST)

        if mixture is not None and may_be_fastest(1.0, between.share(memory)):
            tell("searching the activations to offload")
            _evaluate_mixtures(state, pool, between, mixture)  # mostly makes further settings unnecessary
        for kind, grades in graded.items():
            steps = len(grades) + 1
            # The last setting recomputes each layer and is no grade (partial setting).
            share = min(math.ceil(between.share(memory) * steps), len(grades)) / steps
            if is_valid(base.with_(grades[0]), job) and may_be_fastest(kind.grade_cost, share):
                tell(f"searching {kind.name} settings that fit")
                if least_grade := _least_that_fits(state, pool, between, grades):
                    add_candidate(state, *least_grade)


def _evaluate_mixtures(
    state: SearchState, pool: WorkerPool, between: _RecomputedPair, mixture: Mixture
) -> None:
    """Simulate recipes that offload activations of some layers to the host and recompute others. Add those
    that fit and are faster than all others that fit to the search.
    """
    memory = state.memory_bytes or 0

    def look(recipe: Recipe) -> MixtureTrial | None:
        evaluation = evaluate_recipe(state, pool, recipe)
        if evaluation is None:
            return None
        lacking = evaluation[1].needed_bytes - memory
        if lacking <= 0 and evaluation[1].seconds < state.fastest_that_fits:
            add_candidate(state, *evaluation)
        return MixtureTrial(evaluation[0], lacking, evaluation[1].seconds)

    base = state.space.candidates[between.number].recipe
    gone = between.layers_within(memory, mixture.layers)
    most = min(state.fastest_that_fits, between.seconds_within(memory))
    find_mixture(mixture, RecomputingLine(*between[1:]), base, gone, most, look)


def _find_smaller(state: SearchState, pool: WorkerPool, job: Job, slot: Slot, tell: Tell) -> None:
    """Simulate settings of the technique in this slot (such as checkpointing) that need less memory, for the
    fastest recipes without recomputation that do not fit. Add those that fit and are faster than every other
    recipe that fits.
    """
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
        tell(f"searching the fewest layers for {last.name}")
        # The last setting frees the most bytes. If it does not fit, no other setting does.
        least = evaluate_recipe(state, pool, base.with_(last))
        if least is None or not state.fits(least[1].needed_bytes):
            continue
        known = state.evaluated.get(number) or state.bounds[number]
        between = _RecomputedPair(
            number, known.needed_bytes, known.seconds, least[1].needed_bytes, least[1].seconds
        )
        enough = _least_that_fits(state, pool, between, settings) or least
        if enough[1].seconds < state.fastest_that_fits:
            add_candidate(state, *enough)


def _fastest_too_large(
    state: SearchState, slot: Slot, smaller: Mapping[Technique, Sequence[Technique]], tried: Collection[int]
) -> int | None:
    """Return the fastest recipe that does not fit and may be faster than every one that fits.

    It recomputes no layer, its forward and backward passes differ from those `tried`, and its technique in
    this slot has `smaller` settings.
    """
    most, plain = state.fastest_that_fits * (1 - AS_FAST), roster.plain(Slot.CHECKPOINTING)
    seconds: dict[int, float] = {}
    for number, bound in state.bounds.items():
        candidate, known = state.space.candidates[number], state.evaluated.get(number) or bound
        of_slot = smaller.get(candidate.recipe[slot])
        if not of_slot or candidate.recipe[Slot.CHECKPOINTING] != plain or candidate.sized in tried:
            continue
        if known.seconds < most and not state.fits(known.needed_bytes):
            seconds[number] = known.seconds
    return min(seconds, key=lambda number: (seconds[number], number), default=None)


def _find_lesser(state: SearchState, pool: WorkerPool, slot: Slot, lesser: Sequence[Technique]) -> None:
    """Search the setting with the fewest layers that fits, for the fastest recipes that fit with the
    technique in all layers. Add those that are faster.
    """
    fitting = [number for number in state.front() if state.fits(state.evaluated[number].needed_bytes)]
    for number in fitting[:KEPT_RECIPES]:
        base = state.space.candidates[number].recipe
        low, high = 0, len(lesser) + 1  # indices: the last that does not fit, and the first that does
        for _ in range(2 * ROUNDS):
            if high - low <= 1:
                break
            middle = (low + high) // 2
            evaluation = evaluate_recipe(state, pool, base.with_(lesser[middle - 1]))
            if evaluation is None:
                break
            if state.fits(evaluation[1].needed_bytes):
                high = middle
                if evaluation[1].seconds < state.fastest_that_fits:
                    add_candidate(state, *evaluation)
            else:
                low = middle


def _most_promising(state: SearchState, slot: Slot, cost: float) -> _RecomputedPair | None:
    """Return the recipe with the least estimated seconds if just enough layers are recomputed, the simplest
    of equally fast ones. Recipes with the same passes as those in `state.graded` are skipped.

    Return None if none may be faster than all recipes that fit. Recomputing then counts with the share `cost`
    of its estimated seconds.
    """
    space, memory = state.space, state.memory_bytes or 0
    most = state.fastest_that_fits * (1 - AS_FAST)
    lines = [
        line
        for line in _lines(state, slot)
        if line.seconds_at(line.share(memory) * cost) < most
        and space.candidates[line.number].sized not in state.graded
    ]
    least = min((line.seconds_within(memory) for line in lines), default=math.inf)
    as_fast = [line for line in lines if line.seconds_within(memory) <= least * (1 + AS_FAST)]
    return min(
        as_fast,
        key=lambda line: (space.changes(space.candidates[line.number].recipe), line.seconds_within(memory)),
        default=None,
    )


def _lines(state: SearchState, slot: Slot) -> Iterator[_RecomputedPair]:
    """Yield pairs of recipes: one that recomputes nothing and does not fit, and one with each layer
    recomputed that may fit.
    """
    space, plain = state.space, roster.plain(slot)
    every = next((technique for technique in space.offers(slot) if technique.value == EVERY_LAYER), None)
    for number, bound in state.bounds.items():
        known = state.evaluated.get(number) or bound
        is_plain = space.candidates[number].recipe[slot] == plain
        if not is_plain or state.fits(known.needed_bytes) or every is None:
            continue
        other = space.variant(number, every)
        if other is None:
            continue
        full = state.evaluated.get(other) or state.bounds.get(other)
        # If the recipe with each layer recomputed was not simulated, only the bytes of the update are
        # certain.
        least = full.needed_bytes if full else bound.resting_bytes
        if state.fits(least):
            most = max(full.seconds, known.seconds) if full else known.seconds * (1 + ASSUMED_RECOMPUTE_SHARE)
            yield _RecomputedPair(number, known.needed_bytes, known.seconds, least, most)


def _least_that_fits(
    state: SearchState, pool: WorkerPool, between: _RecomputedPair, grades: Sequence[Technique]
) -> tuple[Recipe, Figures] | None:
    """Return the recipe with the first of these settings that fits, with its bytes and seconds. `grades`
    recompute more and more layers. Return None if none was found, or if it is no faster than the fastest that
    fits.
    """
    low, high = 0, len(grades) + 1  # too large, and fitting: 0 recomputes nothing, the last one each layer
    low_bytes, high_bytes = between.needed_bytes, between.least_bytes
    least_grade: tuple[Recipe, Figures] | None = None
    base, memory = state.space.candidates[between.number].recipe, state.memory_bytes or 0
    for _ in range(ROUNDS):
        if high - low <= 1:
            break
        guess = guess_between(low, high, low_bytes, high_bytes, memory)
        # If one of two neighbours misses and the other fits, the search ends at once. Compiling is expensive.
        for grade in sorted({guess, guess if grades[0].lowered else max(guess - 1, low + 1)}):
            evaluation = evaluate_recipe(state, pool, base.with_(grades[grade - 1]))
            if evaluation is None:
                return least_grade
            _, figures = evaluation
            if state.fits(figures.needed_bytes):
                high, high_bytes, least_grade = grade, figures.needed_bytes, evaluation
                break
            low, low_bytes = grade, figures.needed_bytes
            # Further grades recompute more layers, so they are slower.
            if figures.seconds >= state.fastest_that_fits:
                return None
    return least_grade if least_grade and least_grade[1].seconds < state.fastest_that_fits else None


def evaluate_recipe(state: SearchState, pool: WorkerPool, recipe: Recipe) -> tuple[Recipe, Figures] | None:
    """Simulate a recipe, and return it with its bytes and seconds. Its allocator is the simplest with which
    it fits, or else that with the fewest bytes. Return None if it cannot be simulated.
    """
    space = state.space
    # The simplest allocator comes first, and is chosen if the recipe fits with it.
    allocators = sorted(
        space.offers(Slot.ALLOCATOR), key=lambda allocator: allocator != space.simplest[Slot.ALLOCATOR]
    )
    stand_ins = {allocator: stand_in(space, allocator) for allocator in map(recipe.with_, allocators)}
    recipes = [allocator for allocator in stand_ins if stand_ins[allocator] is not None]
    question = Question(
        stand_ins[recipes[0]] or 0, "evaluate", ([allocator.setup() for allocator in recipes],)
    )
    # The worker that simulated these passes already has their recordings.
    [(_, answer)] = pool.answers_to(
        [question], lambda worker, allocator: state.is_for(worker, allocator.number)
    )
    if isinstance(answer, SnugfitError):
        return None
    evaluations = [(allocator, figures) for allocator, (figures,) in zip(recipes, answer, strict=True)]
    fitting = [allocator for allocator in evaluations if state.fits(allocator[1].needed_bytes)]
    return fitting[0] if fitting else min(evaluations, key=lambda allocator: allocator[1].needed_bytes)


def add_candidate(state: SearchState, recipe: Recipe, figures: Figures | None = None) -> None:
    """Add this recipe to the searched recipes, with its bytes and seconds if they are known."""
    space, setup, number = state.space, recipe.setup(), len(state.space.candidates)
    # Negative identifiers differ from those of all other recipes of the search.
    update, own, like = step_key(setup).update, -number, stand_in(space, recipe)
    program = own if like is None else space.candidates[like].program
    new = Candidate(
        recipe=recipe, setup=setup, update=update, passes=own, sized=own, program=program, trace=own
    )
    state.space = replace(space, candidates=(*space.candidates, new), graded={**space.graded, recipe: number})
    if figures is None:
        # A lower bound of 0 excludes no recipe.
        state.bounds[number] = Bound(0, 0.0)
    else:
        state.bounds[number] = Bound(figures.needed_bytes, figures.seconds)
        state.store(number, figures)


def stand_in(space: Space, recipe: Recipe) -> int | None:
    """Return the index of a searched recipe that represents this one: techniques outside of the search are
    replaced by default ones. Return None if the result is not among the searched recipes.
    """
    for technique in recipe:
        if technique not in space.offers(technique.slot):
            plain, offered = roster.plain(technique.slot), space.offers(technique.slot)
            recipe = recipe.with_(plain if plain in offered else offered[0])
    return space.number(recipe)
