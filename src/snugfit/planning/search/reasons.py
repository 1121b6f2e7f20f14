"""Explain the plan's best recipe, slot by slot (such as precision or optimizer), and the changes to the
user's own recipe.

A slot's reason is a comparison of two simulated recipes. A recipe whose layers are not compiled yet is
estimated instead. The reason compares the best recipe with the same recipe and the slot's plain technique. If
the plain one was chosen or is not available, the fastest other technique takes its place. For a fixed slot,
the reason is that it is fixed.

Each change of the user's recipe is evaluated alone: the user's recipe with only this slot as in the plan.
Their savings do not add up (a smaller micro-batch saves less once layers are recomputed). All changes
together give the plan's bytes and seconds. All are evaluated for the plain training loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.errors import RecipeError, SnugfitError
from snugfit.job.gpu import all_gpus
from snugfit.job.inputs import has_sequence
from snugfit.planning.plan import Change, Reason, Start
from snugfit.planning.search.grades import add_candidate, stand_in
from snugfit.planning.step_key import differ_in_launches, launches_otherwise
from snugfit.prediction.worker_pool import Question, WorkerPool
from snugfit.techniques import roster
from snugfit.techniques.technique import Fidelity, Slot
from snugfit.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.planning.cost.figures import Figures
    from snugfit.planning.keep import Kept
    from snugfit.planning.search.state import SearchState
    from snugfit.results.step_seconds import StepSeconds
    from snugfit.techniques.recipe import Recipe


class Explanation(NamedTuple):
    """Explanation of a plan's best recipe: reasons by slot, warnings, and a check by full simulation."""

    verified: bool
    """True if a full simulation of the best recipe gave the same bytes."""
    doubts: tuple[str, ...]
    reasons: tuple[Reason, ...]
    timing: StepSeconds | None
    """Seconds of the best recipe's step; None if the GPU's rates are unknown."""


def explain(state: SearchState, pool: WorkerPool, best: int, job: Job) -> Explanation:
    """Return the explanation of a plan's best recipe, from its full simulation and the alternatives in each
    slot (such as the optimizer).

    Raises `SnugfitError` if the best recipe cannot be simulated.
    """
    recipe = state.space.candidates[best].recipe
    state.screen_these(_comparable(state, recipe), lambda least: True)
    alternatives = {slot: _alternative(state, recipe, slot) for slot in Slot}
    for slot, other in alternatives.items():
        if other is None or state.space.number(other) is not None or stand_in(state.space, other) is None:
            continue
        if any(any(technique.objections(job, other)) for technique in other):
            alternatives[slot] = None  # valid only with the technique without a grade
        else:
            add_candidate(state, other)
    candidates = state.space.candidates
    numbers = {slot: state.space.number(other) for slot, other in alternatives.items() if other is not None}
    to_evaluate = {
        number for number in numbers.values() if number is not None and number not in state.evaluated
    }
    to_lower = [number for number in to_evaluate if state.must_be_lowered(number)]
    estimates = {number: estimate for number in to_lower if (estimate := _estimate(state, best, number))}
    unknown = {
        estimate for estimate in to_evaluate if estimate in state.bounds or estimate in to_lower
    } - estimates.keys()
    questions = [Question(best, "verify", (recipe, state.evaluated[best]))]
    # A recipe that is not compiled yet takes the longest, so it starts first.
    longest_first = sorted(unknown, key=lambda n: (state.is_begun(n), candidates[n].setup.lowering is None))
    questions += [Question(number, "evaluate", ([candidates[number].setup],)) for number in longest_first]
    verified, doubts, timing = False, (), None
    for number, value in pool.answers_to(
        questions, lambda worker, estimate: state.is_for(worker, estimate.number)
    ):
        if number == best and isinstance(value, SnugfitError):
            raise value
        if number == best:
            verified, doubts, timing = value
        elif not isinstance(value, SnugfitError):
            state.evaluated[number] = value[0][0]
    fixed, own = state.space.fixed, state.evaluated[best]
    known = state.evaluated | estimates
    figures = {slot: known.get(number) for slot, number in numbers.items() if number is not None}
    reasons = (
        replace(
            _reason(slot, recipe, other, figures.get(slot), fixed.reason_for(slot)),
            because=_because(recipe, other, own, figures.get(slot)),
            is_estimated=numbers.get(slot) in estimates,
        )
        for slot, other in alternatives.items()
        if other is not None or slot in fixed.slots
    )
    return Explanation(verified, doubts, tuple(reasons), timing)


def _comparable(state: SearchState, recipe: Recipe) -> Iterator[int]:
    """Yield the recipes with which the best recipe's technique in one slot (such as the optimizer) may be
    compared. A recipe whose layers would first have to be compiled is replaced by the uncompiled one.
    """
    for slot in Slot:
        if (plainer := _plainer(state, recipe, slot)) is None:
            yield from _affordable(state, recipe, slot)
        elif (number := stand_in(state.space, plainer)) is not None:
            if state.must_be_lowered(number):
                number = state.space.variant(number, roster.plain(Slot.ENGINE))
            yield from () if number is None else (number,)


def _estimate(state: SearchState, answer: int, number: int) -> Figures | None:
    """Return the estimated bytes and seconds of a recipe that is not compiled yet; None without bounds.

    They differ from the best recipe's by as much as the lower bounds of both recipes without compilation.
    """
    bounds = []
    for candidate in (answer, number):
        plain = stand_in(
            state.space, state.space.candidates[candidate].recipe.with_(roster.plain(Slot.ENGINE))
        )
        bounds.append(state.bounds.get(plain) if plain is not None else None)
    own, (first, second) = state.evaluated[answer], bounds
    if first is None or second is None:
        return None
    more = second.needed_bytes - first.needed_bytes
    seconds = own.seconds + second.seconds - first.seconds
    return own._replace(reserved_bytes=own.reserved_bytes + more, seconds=seconds)


def _alternative(state: SearchState, recipe: Recipe, slot: Slot) -> Recipe | None:
    """Return the recipe with which the best recipe is compared to show the gain of its technique in this
    slot. It has the slot's default technique, or else the other one with the least lower bound of seconds.
    Return None if the slot has no other technique.
    """
    if (plainer := _plainer(state, recipe, slot)) is not None:
        return plainer
    bounds = [
        (state.bounds[number].seconds, number)
        for number in _affordable(state, recipe, slot)
        if number in state.bounds
    ]
    return recipe.with_(state.space.candidates[min(bounds)[1]].recipe[slot]) if bounds else None


def _plainer(state: SearchState, recipe: Recipe, slot: Slot) -> Recipe | None:
    """Return the recipe with the default technique in this slot, such as the optimizer. Return None if the
    recipe already has it, or if it is not searched.
    """
    plain = roster.plain(slot)
    return None if recipe[slot] == plain or plain not in state.space.offers(slot) else recipe.with_(plain)


def _affordable(state: SearchState, recipe: Recipe, slot: Slot) -> list[int]:
    """Return the candidate recipes that differ only in this slot (a choice of the recipe, such as precision)
    and need no new compilation.
    """
    similar = state.space.candidates[stand_in(state.space, recipe) or 0].recipe
    return [number for number in state.space.others(similar, slot) if not state.must_be_lowered(number)]


def _because(
    recipe: Recipe, other: Recipe | None, figures_of_recipe: Figures, figures: Figures | None
) -> str:
    """Return a sentence on the launch seconds that the recipe's CUDA graphs save, in comparison with the
    other recipe. Return an empty text if they save none.
    """
    if other is None or figures is None or not launches_otherwise(recipe.setup()):
        return ""
    saved = figures.seconds - figures_of_recipe.seconds
    if saved <= 0 or not differ_in_launches(recipe.setup(), other.setup()):
        return ""
    return f"bound by the host: {show_seconds(saved)} of launches saved"


def _reason(
    slot: Slot,
    recipe: Recipe,
    other: Recipe | None,
    figures: Figures | None,
    kept_reason: str,
) -> Reason:
    return Reason(
        slot=slot.value,
        chosen=str(recipe[slot]),
        against=str(other[slot]) if other else "",
        needed_bytes=figures.needed_bytes if figures else None,
        step_seconds=figures.step_seconds if figures else None,
        once_seconds=figures.once if figures else None,
        why_not="" if figures or not other else "it is not possible for this job, GPU and fidelity",
        kept=kept_reason,
    )


def cures(
    recipe: Recipe, needed_bytes: int, job: Job, memory_bytes: int, fidelity: Fidelity, fixed: Kept
) -> Iterator[str]:
    """Yield sentences on changes with which the smallest recipe would fit."""
    needed = show_bytes(needed_bytes)
    yield f"It would fit with {show_bytes(needed_bytes - memory_bytes)} more memory: {recipe} takes {needed}."
    sizes = [(gpu.memory_bytes or 0, gpu.key) for gpu in all_gpus() if gpu.compute_capability]
    if larger := [(size, key) for size, key in sizes if size >= needed_bytes]:
        size, key = min(larger)
        yield f"The smallest GPU in the table with that much is {key}, with {show_bytes(size)}."
    looser = list(Fidelity)[list(Fidelity).index(fidelity) + 1 :]
    more = [
        technique.name
        for technique in roster.techniques()
        if technique.fidelity_for(job) in looser
        and technique.slot not in fixed.slots
        and not technique.planning_objection(job)
        and not technique.needs_several_gpus
    ]
    if more:
        yield f"--fidelity {looser[-1].value} allows more: {', '.join(more)}."
    yield from _last_resorts(job, fixed)
    if fixed.slots:
        yield f"--free {','.join(fixed.slots)} allows other techniques in place of yours."
    smaller = "smaller inputs" if not has_sequence(job.task) else "shorter sequences"
    yield "--gpus N shares the step among N such GPUs."
    sizes_of = ["batch"] * (job.batch_size > 1) + ["sequence-length"] * has_sequence(job.task)
    if sizes_of:
        flags = " or ".join(f"--largest {size}" for size in sizes_of)
        yield f"snugfit predict with --recipe '{recipe}' and {flags} finds the size that fits."
    cut = recipe.pieces == job.batch_size
    yield f"It would also fit with {smaller}{': the global batch cannot be cut further' if cut else ''}."


# ---- the user's own recipe -------------------------------------------------------------------------------


def compare_with_start(start: Recipe, chosen: Recipe, pool: WorkerPool, job: Job, gpu: Gpu | None) -> Start:
    """Return a comparison of the user's recipe `start` with the plan's, with the effect of each change on
    bytes and seconds."""
    slots = [slot for slot in Slot if start[slot] != chosen[slot]]
    results: dict[int, Figures | SnugfitError] = {}
    questions = []
    for number, recipe in enumerate([start, *(start.with_(chosen[slot]) for slot in slots)]):
        try:
            recipe.check(job, gpu.compute_capability if gpu else None)
            questions.append(Question(number, "evaluate", ([recipe.setup()],)))
        except RecipeError as objection:
            results[number] = objection
    for number, value in pool.answers_to(questions):
        results[number] = value if isinstance(value, SnugfitError) else value[0][0]
    at_start = results[0]
    return Start(
        recipe=str(start),
        **_cost_of(at_start),
        why_not=str(at_start).splitlines()[-1] if isinstance(at_start, SnugfitError) else "",
        changes=tuple(
            Change(
                slot=slot.value, theirs=str(start[slot]), ours=str(chosen[slot]), **_cost_of(results[number])
            )
            for number, slot in enumerate(slots, start=1)
        ),
    )


def _cost_of(figures: Figures | SnugfitError) -> dict[str, Any]:
    """Return the bytes and seconds of a recipe as keyword arguments for a plan's `Start` or `Change`; empty
    if it could not be simulated.
    """
    if isinstance(figures, SnugfitError):
        return {}
    return {"needed_bytes": figures.needed_bytes, "step_seconds": figures.step_seconds}


def _last_resorts(job: Job, fixed: Kept) -> Iterator[str]:
    """Yield sentences on techniques that plans do not search but with which a step might fit, with the
    reasons.
    """
    resorts = [
        technique
        for technique in roster.techniques()
        if technique.last_resort and technique.slot not in fixed.slots and not technique.missing_package()
    ]
    unsearched: dict[str, list[str]] = {}
    for technique in resorts:
        word = technique.last_resort
        if technique.searched:
            yield (
                f"--keep '{word}' plans with a technique that makes steps smaller and slower. "
                f"{technique.summary()}"
            )
            continue
        unsearched.setdefault(technique.planning_objection(job), []).append(word)
        yield (
            f"A plan does not search with '{word}': predict a recipe that has it, such as "
            f"'{word} + bf16 + every_layer'. {technique.summary()}"
        )
    for reason, names in unsearched.items():
        yield f"{', '.join(names)}: {reason}."
