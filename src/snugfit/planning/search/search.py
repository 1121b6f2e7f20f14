"""The search: every valid recipe, as few full rehearsals as that takes, and still an exact answer.

Each Setup first gets its lower bounds (`Parts.screen`), but for kinds of recomputing that cannot matter
(`recomputing.py`). Setups are judged in the order of their least seconds: put together in full, timed, and
sent through the allocator. A kind that may be faster than all of them is screened before (`best_first.py`).
A Setup that is dominated by one that was judged, by its lower bounds and up to a resolution of memory, is
left out, unless it may fit where that one does not. So what remains is the Pareto front of the space, up to
that resolution, and the fastest that fits, exactly: less memory can never give a faster plan. Where the
smallest is asked for, or nothing fits, whatever could be smaller yet is judged too. Where a memory is given,
the front ends a tenth beyond it; and at `SLOWEST` times the answer's seconds, unless the whole is asked for.

What is judged must never be less than its lower bound. Where it is, the model's layers do not grow as they
seemed to, and the search starts again without shortcuts.

Of recipes that are as fast as the answer the simplest is taken (`simpler.py`). At the end it is simulated in
full, by `predict`, and the plan says whether that gave the same.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from snugfit.errors import RehearsalError, UsageError
from snugfit.planning.cost.startup_share import PlannedRun
from snugfit.planning.keep import Free, Keep, kept_of
from snugfit.planning.plan import SLOWEST, Pace, Plan, nearest_miss
from snugfit.planning.request import fidelity_of, refuse_bad_request, start_of
from snugfit.planning.search.best_first import BestFirst
from snugfit.planning.search.grades import find_grades
from snugfit.planning.search.progress import Tell, with_best
from snugfit.planning.search.ranking import rank_best
from snugfit.planning.search.recomputing import RecomputingKinds
from snugfit.planning.search.released import find_released
from snugfit.planning.search.simpler import AS_FAST
from snugfit.planning.search.space import Space, space_of
from snugfit.planning.search.state import BEYOND_MEMORY, NEGLIGIBLE_BYTES, SearchState
from snugfit.prediction.device import doubts_about, policy_for
from snugfit.prediction.headroom import headroom_of
from snugfit.prediction.profile import Software, installed_versions
from snugfit.prediction.rates import link_of
from snugfit.prediction.startup import STARTUP_RATES, StartupRates
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.planning.cost.timer import Timer
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
    tell: Tell = lambda what: None,
) -> Plan:
    """The recipe that `objective` asks for among those that fit `gpu`, or `memory_bytes` of it.

    `headroom` (bytes, or text such as `2%`) of the memory stays free; by default 2 % of the GPU's and what is
    in doubt of the bytes (`prediction/headroom.py`), and nothing of `memory_bytes`. Where no recipe leaves
    that, the answer is the smallest. `fidelity` is the least exact that is allowed. `clock` gives the seconds
    of a trace; by default it is this GPU's. `workers` processes rehearse side by side, by default two where
    there are as many cores. The plan lists the `ranked` best that fit, and says what it would change in the
    recipe to `start` from, which may be text. `steps` is how long the run is: a recipe's start-up, at the
    rates of `once`, is then spread over it. Slots of the techniques that `keep` names are not searched, nor
    the adapters, the precision and the optimizer's family of the recipe to `start` from, unless they are
    `free`. The front ends at `SLOWEST` times the answer's seconds, unless the `whole_front` or the smallest
    recipe is asked for. What a `front_end` refuses (`step/applier.py`) is left out. `tell` hears what is
    being done. When nothing fits, the plan says so and holds the nearest miss. Raises `UsageError`
    for what cannot be, and `SnugfitError` if no recipe can be rehearsed.
    """
    from snugfit.job.gpu import find_gpu
    from snugfit.planning.cost.parts_pool import load_ahead, with_pool
    from snugfit.planning.cost.timer import SingleGpuTimer

    refuse_bad_request(job, objective=objective, memory_bytes=memory_bytes, workers=workers)
    gpu = None if gpu is None else find_gpu(gpu)
    policy_for(gpu, Software())  # which refuses a GPU that no step runs on
    fidelity, start = fidelity_of(fidelity), start_of(start, ranked)
    capability = gpu.compute_capability if gpu else None
    fixed = kept_of(job, keep, free, start)
    fixed.refuse(capability)
    timer = SingleGpuTimer(clock) if clock else _timer_of(gpu)
    headroom_bytes = headroom_of(headroom, gpu, memory_bytes)
    if memory_bytes is None and gpu is not None:
        memory_bytes = gpu.memory_bytes
    workers = min(2, os.cpu_count() or 1) if workers is None else workers
    load_ahead(job, [gpu], timer, workers, ahead=fixed.preloaded)
    space = space_of(job, fidelity=fidelity, capability=capability, fixed=fixed, front_end=front_end)
    slowest = math.inf if whole_front or objective == "memory" else SLOWEST
    request = _PlanRequest(
        job, gpu, memory_bytes, headroom_bytes, fidelity, objective, steps, ranked, start, slowest, tell
    )
    answer, run = partial(_answer, request, space), PlannedRun(steps=steps, rates=once)
    return with_pool(answer, job, [gpu], timer, workers=workers, run=run, tell=tell)


@dataclass(frozen=True)
class _PlanRequest:
    """What is asked of a plan, checked."""

    job: Job
    gpu: Gpu | None
    memory_bytes: int | None
    headroom_bytes: int
    fidelity: Fidelity
    objective: str
    steps: int | None
    ranked: int
    start: Recipe | None
    slowest: float
    tell: Tell


def _answer(asked: _PlanRequest, space: Space, pool: WorkerPool) -> Plan:
    """The plan that a search of this space gives."""
    from snugfit.planning.search.reasons import compare_with_start, cures, explain
    from snugfit.planning.search.simpler import judge_simpler, prefer_simple, simplify_front

    job, memory, smallest = asked.job, asked.memory_bytes, asked.objective == "memory"
    listed = asked.ranked > 0  # any candidate may be among the best few
    bound = None if memory is None else memory - asked.headroom_bytes
    slowest = asked.slowest * (1 + AS_FAST)
    state = SearchState(space, memory_bytes=bound, negligible_bytes=NEGLIGIBLE_BYTES, slowest=slowest)
    tell = with_best(asked.tell, lambda: state.best_so_far(asked.objective, job.batch_size))
    search(state, pool, tell, smallest=smallest, every_bound=listed)
    looked_at = _look_further(asked, state, pool, tell)
    space = state.space
    front = _front_of(state)
    fitting = [n for n in front if bound is None or state.judged[n].needed_bytes <= bound]
    fitting = fitting or [n for n in front[-1:] if state.judged[n].needed_bytes <= (memory or 0)]
    best = fitting[-1 if smallest else 0] if fitting else None
    if best is not None and not smallest:
        best = prefer_simple(state, pool, best)
    if best is not None:
        front = [n for n in front if state.judged[n].seconds <= asked.slowest * state.judged[best].seconds]
    judge_simpler(state, pool, front)
    front = simplify_front(state, front, lambda n: bound is None or state.judged[n].needed_bytes <= bound)
    front = sorted({*front, *([] if best is None else [best])}, key=state.rank)
    sizes = [state.judged[number].needed_bytes for number in front]
    shown = front[nearest_miss(sizes, asked.objective)] if best is None else best
    recipe, needed_bytes = space.candidates[shown].recipe, state.judged[shown].needed_bytes
    asked.tell("simulating the answer in full and comparing it slot by slot")
    explanation = explain(state, pool, shown, job)
    lacking = () if fitting else cures(recipe, needed_bytes, job, memory or 0, asked.fidelity, space.fixed)
    start = compare_with_start(asked.start, recipe, pool, job, asked.gpu) if asked.start else None
    excluded = tuple(one for one in (*space.excluded, *state.excluded) if one.what != looked_at)
    counts = state.counts()
    ranked = _rank_few(asked, state, pool, tell, best) if asked.ranked else []
    assumed = [doubt for number in (*front, *ranked) for doubt in state.judged[number].doubts]
    return Plan(
        job=job,
        gpu=asked.gpu,
        memory_bytes=memory,
        headroom_bytes=asked.headroom_bytes,
        fidelity=asked.fidelity.value,
        objective=asked.objective,
        steps=asked.steps,
        front=tuple(state.choice(number, job.batch_size) for number in front),
        best=None if best is None else state.choice(best, job.batch_size),
        ranked=tuple(state.choice(number, job.batch_size) for number in ranked),
        reasons=explanation.reasons,
        kept=space.fixed.listing(),
        start=start,
        cures=tuple(lacking),
        refused=excluded,
        counts=counts,
        verified=explanation.verified,
        timing=_pace_of(explanation.timing),
        versions=installed_versions(),
        doubts=tuple(dict.fromkeys((*explanation.doubts, *assumed, *doubts_about(asked.gpu)))),
    )


def _front_of(state: SearchState) -> list[int]:
    """The Pareto front of what was judged. Raises `RehearsalError` where nothing was."""
    if front := state.front():
        return front
    why = next((f"'{one.what}': {one.why}" for one in state.excluded), "the space is empty.")
    raise RehearsalError(f"No recipe could be simulated. The first: {why}")


def _look_further(asked: _PlanRequest, state: SearchState, pool: WorkerPool, tell: Tell) -> str:
    """Adds what is no part of the space and better than what is; the name of a technique that was looked at
    though no space has it."""
    smallest = asked.objective == "memory"
    if not smallest:
        find_grades(state, pool, asked.job, tell, link_of(asked.gpu))
    return find_released(state, pool, asked.job, tell, smallest=smallest)


def _rank_few(
    asked: _PlanRequest, state: SearchState, pool: WorkerPool, tell: Tell, best: int | None
) -> list[int]:
    """The best few, of which the answer is the first."""
    ranked = rank_best(state, asked.ranked, pool, asked.objective, tell)
    if best is None:
        return ranked
    seconds = state.judged[best].seconds
    rest = [number for number in ranked if state.judged[number].seconds != seconds]
    return [best, *rest][: asked.ranked]


def _pace_of(timing: StepSeconds | None) -> Pace | None:
    """What a plan tells of its answer's seconds."""
    if timing is None:
        return None
    return Pace(bound=timing.bound, measured_rates=timing.measured_rates, peak_seconds=timing.peak_seconds)


def search(
    state: SearchState,
    pool: WorkerPool,
    tell: Tell = lambda what: None,
    *,
    smallest: bool = False,
    every_bound: bool = False,
) -> None:
    """Judges the Pareto front of the state's space, with the fastest recipe that fits its memory on it; and
    the smallest there is, where that is asked for or nothing fits. `every_bound` gives what is not judged its
    lower bounds too. Raises `BelowLowerBound`."""
    recomputing = RecomputingKinds([state], pool, tell, budgets=every_bound)
    _judge_front(state, recomputing, pool, tell, every_bound=every_bound)
    if smallest or state.nothing_fits:
        state.judge_smallest(pool, tell)
        recomputing.screen(lambda number, least: least[0].needed_bytes <= state.smallest, twins=False)
        state.judge_smallest(pool, tell)
    if state.nothing_fits:
        state.most_bytes = state.smallest * (1 + BEYOND_MEMORY)
        _judge_front(state, recomputing, pool, tell, every_bound=every_bound)
    state.excluded += recomputing.left_out()


def _judge_front(
    state: SearchState, recomputing: RecomputingKinds, pool: WorkerPool, tell: Tell, *, every_bound: bool
) -> None:
    """Judges whatever may be on the front, as far up as that goes."""
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
