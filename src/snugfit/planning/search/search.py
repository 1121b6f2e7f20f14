"""The search: every lawful recipe, as few whole rehearsals as that takes, and nothing left to chance.

Each Setup is first given the least that it can take (`Parts.screen`). Then Setups are judged in the order of
their least seconds: put together whole, timed, and sent through the allocator. A Setup that cannot be better
than one that was judged, neither in seconds nor by a grain in bytes, is left out, unless it may fit where
that one does not. So what remains is the Pareto front of the space, up to that grain, and the fastest that
fits, exactly: less memory can never give a faster plan. Where the smallest is asked for, or nothing fits,
whatever could be smaller yet is judged too.

What is judged must never be less than what was screened. Where it is, the model's layers do not grow as they
seemed to, and the search begins again without shortcuts.

At the end the best recipe is rehearsed whole, by `predict`, and the plan says whether that gave the same.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from snugfit.errors import SnugfitError, UsageError, did_you_mean
from snugfit.planning.cost.run import Run
from snugfit.planning.plan import OBJECTIVES, Plan
from snugfit.planning.search.from_recipe import compared
from snugfit.planning.search.screening import Progress, Tell, exclusion, screened
from snugfit.planning.search.space import Space, fidelity_of, space_of
from snugfit.planning.search.state import Searched
from snugfit.prediction.startup import STARTUP_RATES, StartupRates
from snugfit.prediction.worker_pool import Question, WorkerPool
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity, Slot

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.planning.cost.figures import Bound
    from snugfit.planning.cost.timer import Clock
    from snugfit.rehearsal.trace.trace import Trace
    from snugfit.techniques.technique import Technique


def plan(
    job: Job,
    *,
    gpu: Gpu | str | None = None,
    memory_bytes: int | None = None,
    fidelity: str | Fidelity = Fidelity.ROUNDS,
    objective: str = "speed",
    clock: Callable[[Trace], float] | None = None,
    workers: int | None = None,
    ranked: int = 0,
    start: Recipe | str | None = None,
    steps: int | None = None,
    once: StartupRates = STARTUP_RATES,
    settled: Mapping[Slot, Technique] = MappingProxyType({}),
    tell: Tell = lambda what: None,
) -> Plan:
    """The recipe that `objective` asks for among those that fit `gpu`, or `memory_bytes` of it.

    `fidelity` is the least exact that is allowed. `clock` tells the seconds of a trace; by default it is this
    GPU's. `workers` processes rehearse side by side, by default two where there are as many cores. The plan
    lists the `ranked` best that fit, and says what it would change in the recipe to `start` from, which may
    be text. `steps` is how long the run is: what a recipe pays once, at the rate of `once`, is then spread
    over it. Slots that are `settled` are not searched. `tell` hears what is being done. Raises `UsageError`
    for what cannot be, and `SnugfitError` when no recipe of the space can be rehearsed. When nothing fits,
    the plan says so and holds the nearest miss.
    """
    from snugfit.job.gpu import find_gpu
    from snugfit.job.job import refuse_what_is_no_job
    from snugfit.planning.cost.parts_pool import load_ahead, with_pool
    from snugfit.planning.cost.timer import Alone
    from snugfit.planning.search.reasons import explained

    refuse_what_is_no_job(job)
    gpu = None if gpu is None else find_gpu(gpu)
    fidelity = fidelity_of(fidelity)
    refuse(objective, memory_bytes, workers)
    start = _start_of(start, ranked)
    run = Run(steps=steps, rate=once)
    clocks = Alone(clock) if clock else _clock_of(gpu)
    if memory_bytes is None and gpu is not None:
        memory_bytes = gpu.memory_bytes
    workers = min(2, os.cpu_count() or 1) if workers is None else workers
    load_ahead(job, [gpu], clocks, workers)
    capability = gpu.compute_capability if gpu else None
    space = space_of(job, fidelity=fidelity, capability=capability, settled=settled)

    def made(pool: WorkerPool) -> Plan:
        searched = search(space, pool, tell, memory_bytes=memory_bytes, smallest=objective == "memory")
        made = explained(
            searched, pool, job=job, gpu=gpu, memory_bytes=memory_bytes, fidelity=fidelity,
            objective=objective, tell=tell,
        )  # fmt: skip
        made = replace(made, steps=steps)
        made = _with_ranked(made, searched, pool, ranked, tell) if ranked else made
        return _with_start(made, start, pool) if start else made

    return with_pool(made, job, [gpu], clocks, workers=workers, run=run, tell=tell)


def search(
    space: Space,
    pool: WorkerPool,
    tell: Tell = lambda what: None,
    *,
    memory_bytes: int | None = None,
    smallest: bool = False,
) -> Searched:
    """The space's Pareto front, with the fastest recipe that fits so much memory on it; and with the smallest
    there is, where that is asked for or nothing fits. Raises `BelowLowerBound`, and `SnugfitError` when
    nothing can be rehearsed."""
    seen = screened(space, pool, tell)
    bounds = {number: each for number, (each,) in seen.bounds.items()}
    found = Searched(space, bounds, excluded=seen.excluded, kinds=seen.kinds, memory_bytes=memory_bytes)
    _judge_all(found, pool, found.beaten, _least_seconds, tell)
    if smallest or (memory_bytes is not None and found.smallest > memory_bytes):
        _judge_all(found, pool, found.too_large, _least_bytes, tell)
    return found


def _with_ranked(made: Plan, searched: Searched, pool: WorkerPool, count: int, tell: Tell) -> Plan:
    """The plan with its best recipes listed."""
    from snugfit.planning.search.ranking import best

    numbers = best(searched, pool, count, memory_bytes=made.memory_bytes, objective=made.objective, tell=tell)
    return replace(made, ranked=tuple(searched.choice(each, made.job.batch_size) for each in numbers))


def _with_start(made: Plan, start: Recipe, pool: WorkerPool) -> Plan:
    """The plan beside the recipe that the user started from."""
    ours = Recipe.parse(made.shown.recipe)
    return replace(made, start=compared(start, ours, pool, job=made.job, gpu=made.gpu))


def _start_of(start: Recipe | str | None, ranked: int) -> Recipe | None:
    """The recipe to start from; raises `UsageError` for what is none, and for what cannot be listed."""
    if not (type(ranked) is int and ranked >= 0):
        raise UsageError(f"ranked is {ranked!r}; it is how many of the best are told, a whole number from 0.")
    if start is None or isinstance(start, Recipe):
        return start
    if not isinstance(start, str):
        raise UsageError(f"start is {start!r}; it is a recipe such as 'bf16 + every_layer', or None.")
    return Recipe.parse(start)


def refuse(objective: str, memory_bytes: int | None, workers: int | None = None) -> None:
    """Raises `UsageError` for an objective that there is not, a bound that is no number of bytes, and
    processes that cannot be counted."""
    if objective not in OBJECTIVES:
        raise UsageError(
            f"Unknown objective {objective!r}.{did_you_mean(str(objective), OBJECTIVES)} "
            f"It is one of {', '.join(OBJECTIVES)}."
        )
    if memory_bytes is not None and not (type(memory_bytes) is int and memory_bytes > 0):
        raise UsageError(f"memory_bytes is {memory_bytes!r}; it is a whole number of bytes above 0, or None.")
    if workers is not None and not (type(workers) is int and workers > 0):
        raise UsageError(f"workers is {workers!r}; it is a whole number of processes from 1, or None.")


def _clock_of(gpu: Gpu | None) -> Clock:
    from snugfit.planning.cost.timer import GpuClocks

    if gpu is None:
        raise UsageError("A plan weighs seconds, which need a GPU: add --gpu NAME; --memory may go with it.")
    return GpuClocks([gpu])


def _judge_all(
    found: Searched,
    pool: WorkerPool,
    left_out: Callable[[int], bool],
    order: Callable[[Bound], tuple[float, float]],
    tell: Tell,
) -> None:
    """Judges whatever is not left out when its turn comes, in this order; Setups of one trace together."""
    traces: dict[int, list[int]] = defaultdict(list)
    for number in found.bounds:
        traces[found.space.candidates[number].trace].append(number)
    waiting = deque(sorted(traces.values(), key=lambda group: min(order(found.bounds[n]) for n in group)))
    homes: dict[int, int] = {}  # all that share their passes are judged in one place
    asked: dict[int, list[int]] = {}
    progress = Progress("judging", len(waiting), tell)

    def ask(worker: int) -> Question | None:
        others: list[list[int]] = []
        question: Question | None = None
        while waiting and question is None:
            group = [number for number in waiting.popleft() if not left_out(number)]
            if group and homes.setdefault(found.space.candidates[group[0]].sized, worker) != worker:
                others.append(group)
                continue
            progress.step()
            if group:
                asked[group[0]] = group
                setups = [found.space.candidates[number].setup for number in group]
                question = Question(group[0], "judge", (setups,))
        waiting.extendleft(reversed(others))
        return question

    for number, answer in pool.answers(ask):
        group = asked.pop(number)
        if isinstance(answer, SnugfitError):
            found.excluded.append(exclusion([found.space.candidates[each] for each in group], answer))
            for each in group:
                del found.bounds[each]
            continue
        for each, (figures,) in zip(group, answer, strict=True):
            found.judge(each, figures)


def _least_seconds(least: Bound) -> tuple[float, float]:
    return least.seconds, least.needed_bytes


def _least_bytes(least: Bound) -> tuple[float, float]:
    return least.needed_bytes, least.seconds
