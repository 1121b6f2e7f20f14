"""Search for the best of all valid recipes, with few full simulations and an exact result.

First, lower bounds of each recipe's bytes and seconds are computed (`Parts.screen`), except for recomputing
recipes that cannot be the best (`recomputing.py`). Recipes are then evaluated in the order of their least
seconds: simulated, timed, and replayed through the allocator. Lower bounds of a group that may be faster than
all of them are computed before (`best_first.py`). A recipe is skipped if an evaluated one is as fast and as
small as its lower bounds, within a tolerance. For a recipe that cannot be the fastest, seconds have a
tolerance too. A recipe that may fit is never skipped for one that does not fit.

The result is the Pareto front of all recipes up to these tolerances. The fastest recipe that fits is exact:
less memory can never give a faster plan. If the smallest recipe is requested, or nothing fits, all possibly
smaller ones are evaluated too. With a memory limit, the front ends 10 % above it. It also ends at `SLOWEST`
times the best recipe's seconds, unless the whole front is requested.

An evaluated recipe must not take less than its lower bounds. If it does, bytes or seconds do not grow
linearly with the layers, and the search starts again with whole models.

Among recipes that are as fast as the best, the simplest is chosen (`simpler.py`). At the end it is simulated
in full by `predict`, and the plan reports a mismatch.

**The best few.** Ranking of the best few recipes of a search, which `--verify` measures.

The Pareto front contains only recipes with no other one that is faster and smaller, so the second fastest is
mostly missing. For a list of the best few, further recipes are evaluated in the order of their lower bounds.
The evaluation ends when no remaining recipe can be among them.

**Without an update.** Begin a search for a job without optimizer updates with the simplest recipe, and
recipes with a single change.

Such a job has no lower bounds from few layers, so a full simulation of each group of recipes takes seconds. A
technique that alone makes the step neither faster nor smaller is therefore not combined with others. If the
simplest recipe fits, a technique must be faster.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING

from snugfit.errors import RehearsalError, UsageError
from snugfit.planning.keep import Free, Keep
from snugfit.planning.plan import Exclusion, Pace, Plan, nearest_miss
from snugfit.planning.search.best_first import BestFirst
from snugfit.planning.search.grades import find_grades, find_recomputed
from snugfit.planning.search.plan_request import PlanRequest
from snugfit.planning.search.progress import Tell, with_best
from snugfit.planning.search.recomputing import RecomputingKinds
from snugfit.planning.search.simpler import AS_FAST
from snugfit.planning.search.space import Space, space_of
from snugfit.planning.search.state import NEGLIGIBLE_BYTES, TIME_BOUND_MARGIN, SearchState
from snugfit.prediction.device import doubts_about, policy_for
from snugfit.prediction.profile import Software, installed_versions
from snugfit.prediction.rates import link_of
from snugfit.prediction.startup import STARTUP_RATES, StartupRates
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.registry import hooks
from snugfit.techniques.technique import Fidelity, Slot

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.planning.cost.timer import Timer
    from snugfit.planning.search.progress import Tell
    from snugfit.planning.search.recomputing import RecomputingKinds
    from snugfit.planning.search.state import SearchState
    from snugfit.prediction.worker_pool import WorkerPool
    from snugfit.rehearsal.trace.trace import Trace
    from snugfit.results.step_seconds import StepSeconds


def plan(
    job: Job,
    *,
    gpu: Gpu | str | None = None,
    memory_bytes: int | None = None,
    headroom: int | str | None = None,
    fidelity: str | Fidelity = Fidelity.ROUNDS,
    objective: str = "speed",
    clock: Callable[[Trace], float] | None = None,
    workers: int | None = None,
    ranked: int = 0,
    start: Recipe | str | None = None,
    steps: int | None = None,
    once: StartupRates = STARTUP_RATES,
    keep: Keep = None,
    free: Free = (),
    whole_front: bool = False,
    front_end: str = "",
    tell: Tell = lambda message: None,
) -> Plan:
    """Return a plan: the best recipe by `objective` that fits `gpu`, or `memory_bytes` of it.

    `headroom` (bytes, or text such as `2%`) of the memory stays free. The default is 2 % of the GPU's memory
    and the uncertain bytes (`prediction/headroom.py`), and nothing with `memory_bytes`. If no recipe leaves
    it, the best recipe is the smallest. `fidelity` is the lowest allowed fidelity. `clock` returns the
    seconds of a trace, by default on this GPU. `workers` processes simulate concurrently, by default two if
    there are as many cores. The plan lists the `ranked` best recipes that fit, and changes to the recipe to
    `start` from, which may be text. `steps` is the length of the run over which the start-up, at the rates of
    `once`, is spread. Slots of the techniques in `keep` are not searched. The same holds for the adapters,
    the precision and the optimizer's family of `start`, unless they are `free`. The Pareto front ends at
    `SLOWEST` times the best recipe's seconds, except for a `whole_front` or the objective `memory`.
    Techniques that a `front_end` refuses (`step/applier.py`) are left out. `tell` receives messages on the
    progress. If nothing fits, the plan contains the nearest miss. Raises `UsageError` for invalid arguments,
    and `SnugfitError` if no recipe can be simulated.
    """
    from snugfit.job.gpu import find_gpu
    from snugfit.planning.cost.timer import SingleGpuTimer

    gpu = None if gpu is None else find_gpu(gpu)
    policy_for(gpu, Software())  # it raises an error for a GPU on which no step can run
    request = PlanRequest.of(
        job, [gpu] if gpu else [], memory_bytes=memory_bytes, headroom=headroom, fidelity=fidelity,
        objective=objective, keep=keep, free=free, start=start, ranked=ranked, steps=steps, once=once,
        workers=workers, whole_front=whole_front, tell=tell,
    )  # fmt: skip
    timer = SingleGpuTimer(clock) if clock else _timer_of(gpu)
    request.load_ahead(timer)
    capability = gpu.compute_capability if gpu else None
    space = space_of(
        job, fidelity=request.fidelity, capability=capability, fixed=request.fixed, front_end=front_end
    )
    return request.with_pool(partial(_answer, request, space), timer)


def _answer(request: PlanRequest, space: Space, pool: WorkerPool) -> Plan:
    """Search all valid recipes for the checked arguments `request`, and return the plan."""
    from snugfit.planning.search.reasons import compare_with_start, cures, explain
    from snugfit.planning.search.simpler import evaluate_simpler, simplify_front

    job, gpu, smallest, start = request.job, request.gpu, request.wants_smallest, request.fixed.start
    memory, headroom_bytes, objective = request.memory_on(gpu), request.headroom_on(gpu), request.objective
    bound = None if memory is None else memory - headroom_bytes
    # The chosen recipe may be a simpler one that is slower by up to this share.
    slowest = request.slowest * (1 + AS_FAST)
    state = SearchState(space, memory_bytes=bound, negligible_bytes=NEGLIGIBLE_BYTES, slowest=slowest)
    tell = with_best(request.tell, lambda: state.best_so_far(objective, job.batch_size), job.words.item)
    grade = partial(find_recomputed, state, pool, job, tell, link_of(gpu))
    search(state, pool, tell, smallest=smallest, every_bound=request.ranked > 0, grade=grade)
    looked_at = _try_outside_space(request, state, pool, tell)
    space = state.space
    front = front_of(state)
    best = best_of(state, pool, front, memory, smallest=smallest)
    if best is not None:
        most_seconds = request.slowest * state.evaluated[best].seconds
        front = [number for number in front if state.evaluated[number].seconds <= most_seconds]
    evaluate_simpler(state, pool, front)
    front = simplify_front(state, front, lambda n: bound is None or state.evaluated[n].needed_bytes <= bound)
    # A simpler recipe may have replaced the best one on the front, which must contain it.
    front = sorted({*front, *([] if best is None else [best])}, key=state.rank)
    sizes = [state.evaluated[number].needed_bytes for number in front]
    shown = front[nearest_miss(sizes, objective)] if best is None else best
    recipe, needed = space.candidates[shown].recipe, state.evaluated[shown].needed_bytes
    request.tell("simulating the best recipe with all layers, and comparing it with alternatives")
    explanation = explain(state, pool, shown, job)
    lacking = cures(recipe, needed, job, memory or 0, request.fidelity, space.fixed) if best is None else ()
    compared = compare_with_start(start, recipe, pool, job, gpu) if start else None
    # A technique that was tried after all is not listed as excluded.
    excluded = tuple(item for item in (*space.excluded, *state.excluded) if item.what not in looked_at)
    ranked = _rank_few(request, state, pool, tell, best) if request.ranked else []
    assumed = [doubt for number in (*front, *ranked) for doubt in state.evaluated[number].doubts]
    return Plan(
        job=job,
        gpu=gpu,
        memory_bytes=memory,
        headroom_bytes=headroom_bytes,
        fidelity=request.fidelity.value,
        objective=objective,
        steps=request.run.steps,
        front=tuple(state.choice(number, job.batch_size) for number in front),
        best=None if best is None else state.choice(best, job.batch_size),
        ranked=tuple(state.choice(number, job.batch_size) for number in ranked),
        reasons=explanation.reasons,
        kept=space.fixed.listing(),
        start=compared,
        cures=tuple(lacking),
        refused=excluded,
        counts=state.counts(),
        verified=explanation.verified,
        timing=_pace_of(explanation.timing),
        versions=installed_versions(),
        doubts=tuple(dict.fromkeys((*explanation.doubts, *assumed, *doubts_about(gpu)))),
    )


def front_of(state: SearchState) -> list[int]:
    """Return the Pareto front (bytes, seconds) of the evaluated recipes, by number, the fastest first. Raises
    `RehearsalError` if there are none."""
    if front := state.front():
        return front
    reason = next(
        (f"'{exclusion.what}': {exclusion.why}" for exclusion in state.excluded), "the space is empty."
    )
    raise RehearsalError(
        f"No recipe could be simulated. The first: {reason} Predict the job alone first: snugfit predict."
    )


def best_of(
    state: SearchState, pool: WorkerPool, front: Sequence[int], memory_bytes: int | None, *, smallest: bool
) -> int | None:
    """Return the simplest of the fastest recipes of a Pareto front that fit, or the `smallest`.

    If none leaves the headroom, return the smallest that fits `memory_bytes`; None if nothing fits.
    """
    from snugfit.planning.search.simpler import prefer_simple

    fitting = [number for number in front if state.fits(state.evaluated[number].needed_bytes)]
    if not fitting:
        return next((n for n in front[-1:] if state.evaluated[n].needed_bytes <= (memory_bytes or 0)), None)
    return fitting[-1] if smallest else prefer_simple(state, pool, fitting[0])


def _try_outside_space(
    request: PlanRequest, state: SearchState, pool: WorkerPool, tell: Tell
) -> Sequence[str]:
    """Simulate recipes with techniques that the search does not enumerate, and add those that are better.
    Return the names of the techniques that features tried.
    """
    smallest = request.wants_smallest
    if not smallest:
        find_grades(state, pool, request.job, tell, link_of(request.gpu))
    tried = [search(state, pool, request.job, tell, smallest=smallest) for search in hooks("search_further")]
    return list(filter(None, tried))


def _rank_few(
    request: PlanRequest, state: SearchState, pool: WorkerPool, tell: Tell, best: int | None
) -> list[int]:
    """Return the best few recipes, the plan's best recipe first."""
    ranked = rank_best(state, request.ranked, pool, request.objective, tell)
    if best is None:
        return ranked
    seconds = state.evaluated[best].seconds
    rest = [number for number in ranked if state.evaluated[number].seconds != seconds]
    return [best, *rest][: request.ranked]


def _pace_of(timing: StepSeconds | None) -> Pace | None:
    """Return the bottleneck and peak-rate seconds of a plan's best recipe in the form of a plan; None without
    seconds."""
    if timing is None:
        return None
    return Pace(**{field.name: getattr(timing, field.name) for field in fields(Pace)})


def search(
    state: SearchState,
    pool: WorkerPool,
    tell: Tell = lambda message: None,
    *,
    smallest: bool = False,
    every_bound: bool = False,
    kinds: RecomputingKinds | None = None,
    grade: Callable[[], object] | None = None,
) -> RecomputingKinds:
    """Simulate the Pareto front (bytes, seconds) of the searched recipes, including the fastest that fits.

    If it is requested or nothing fits, evaluate the smallest recipe too. `every_bound` also computes lower
    bounds of all other recipes. Return the postponed recipes; a further search of this state takes them as
    `kinds`. `grade` evaluates recipes that recompute some layers. It runs before layers are compiled for
    recomputing recipes, since it may make them unnecessary. Raises `BelowLowerBound`.
    """
    recomputing = kinds or RecomputingKinds(state, pool, tell)
    if kinds is None and not state.space.trains:
        screen_single_changes(state, recomputing, smallest=smallest)
    if grade is not None and not (every_bound or smallest):
        BestFirst(state, recomputing, tell, postpones=True).run(pool)
        grade()
    _evaluate_front(state, recomputing, pool, tell, every_bound=every_bound)
    if smallest or state.nothing_fits:
        state.evaluate_smallest(pool, tell)
        most = state.smallest * (1 - state.nearly)
        # Postponed groups may be smaller than every evaluated recipe.
        recomputing.screen(lambda number, least: least.needed_bytes <= most, twins=False)
        state.evaluate_smallest(pool, tell)
    if state.nothing_fits:
        state.most_bytes = state.smallest * (1 + state.beyond)
        _evaluate_front(state, recomputing, pool, tell, every_bound=every_bound)
    return recomputing


def _evaluate_front(
    state: SearchState, recomputing: RecomputingKinds, pool: WorkerPool, tell: Tell, *, every_bound: bool
) -> None:
    """Simulate all recipes that may be on the Pareto front of bytes and seconds."""
    if every_bound:
        recomputing.add_others()
    while every_bound and recomputing.screen(lambda number, least: True):
        pass
    BestFirst(state, recomputing, tell).run(pool)


def _timer_of(gpu: Gpu | None) -> Timer:
    from snugfit.planning.cost.timer import GpuTimers

    if gpu is None:
        raise UsageError(
            "A plan compares seconds, which need a GPU. Give gpu='h200' or another; memory_bytes can be "
            "added to it."
        )
    return GpuTimers([gpu])


# ---- the best few ------------------------------------------------------------------------------------------


TRACES_PER_WORKER = 4
"""Number of traces that each worker process evaluates between two checks of the ranking."""


def rank_best(
    state: SearchState, count: int, pool: WorkerPool, objective: str, tell: Tell = lambda message: None
) -> list[int]:
    """Return the best `count` recipes that fit, the best first; fewer if there are no more. Recipes with
    equal seconds count once, such as those with another allocator setting. Raises `BelowLowerBound`.
    """

    def least(number: int) -> float:
        bound = state.bounds[number]
        return bound.needed_bytes if objective == "memory" else bound.seconds * (1 - TIME_BOUND_MARGIN)

    def may_be_listed(number: int) -> bool:
        return number not in state.evaluated and state.fits(state.bounds[number].needed_bytes)

    waiting = deque(state.by_trace(filter(may_be_listed, sorted(state.bounds, key=least))))
    while True:
        ranked = _ranking(state, objective)[:count]
        worst = _value(state, ranked[-1], objective) if len(ranked) == count else math.inf
        tell(f"checking the best {count}: {len(ranked)} found")
        todo: list[list[int]] = []
        while waiting and len(todo) < TRACES_PER_WORKER * len(pool.workers) and least(waiting[0][0]) < worst:
            todo.append(waiting.popleft())
        if not todo:
            return ranked
        state.evaluate(todo, pool)


def _ranking(state: SearchState, objective: str) -> list[int]:
    """Return the evaluated recipes that fit, the best first; of recipes with equal seconds only one."""
    fitting = [number for number, figures in state.evaluated.items() if state.fits(figures.needed_bytes)]
    by_seconds: dict[float, int] = {}
    for number in sorted(
        fitting, key=lambda candidate: (_value(state, candidate, objective), *state.rank(candidate))
    ):
        by_seconds.setdefault(state.evaluated[number].seconds, number)
    return list(by_seconds.values())


def _value(state: SearchState, number: int, objective: str) -> float:
    figures = state.evaluated[number]
    return figures.needed_bytes if objective == "memory" else figures.seconds


# ---- without an update -------------------------------------------------------------------------------------


NO_GAIN = "alone it makes the step neither faster nor smaller, so it was not combined (--keep '{}' does so)"


def screen_single_changes(state: SearchState, kinds: RecomputingKinds, *, smallest: bool) -> None:
    """Simulate the simplest recipe and recipes with a single change of it. Exclude combinations with useless
    changes from the search.
    """
    state.rehearses_whole, space = True, state.space
    simplest = space.number(space.simplest)
    if simplest is None:
        return
    candidates, own = space.candidates, space.candidates[simplest].passes
    singles = [(slot, number) for slot in Slot for number in space.variants(simplest, slot)]
    passes = {own, *(candidates[number].passes for _, number in singles)}
    kinds.add([number for number, candidate in enumerate(candidates) if candidate.passes in passes])
    # Candidates with the passes of the simplest recipe share its simulation.
    other_passes = [(slot, number) for slot, number in singles if candidates[number].passes != own]
    useless = {
        candidates[number].recipe[slot]
        for slot, number in other_passes
        if not _is_useful(state, number, simplest, smallest=smallest)
    }
    left_out = [number for number in kinds.others if not useless.isdisjoint(candidates[number].recipe)]
    kinds.leave_out(left_out)
    for technique in sorted(useless, key=str):
        count = sum(technique in candidates[number].recipe for number in left_out)
        if count:
            reason = NO_GAIN.format(technique)
            state.excluded.append(Exclusion(what=str(technique), why=reason, recipes=count))


def _is_useful(state: SearchState, number: int, simplest: int, *, smallest: bool) -> bool:
    """Return True if a single change makes the simplest recipe faster, or smaller if that is needed."""
    bound, base = state.bounds.get(number), state.bounds.get(simplest)
    # The effect of a change is unknown if one of the two recipes cannot be simulated.
    if bound is None or base is None or bound.seconds < base.seconds * (1 - AS_FAST):
        return True
    needs_less = smallest or not state.fits(base.needed_bytes)
    return needs_less and bound.needed_bytes <= state.worth_listing(base.needed_bytes)
