"""One search for many GPUs.

A rehearsal depends on few properties of a GPU: its kernels (attention, grouped products), and slightly
their workspaces and scratch. GPUs that run the same kernels and allow the same techniques are therefore
searched together, with one rehearsal for all of them. Each has separate seconds and a separate context for
every recipe (`Parts`). Each also selects its own candidates (`per_gpu.py`). The answers are those of
separate plans.

Many GPUs differ only in wide heads, or in the grouped products of experts. They are searched together too,
until a rehearsal depends on such a difference (`CudaPolicy.peers`). Each kind is then searched separately.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from snugfit.errors import SnugfitError, UsageError
from snugfit.job.gpu import all_gpus, find_gpu
from snugfit.planning.cost.startup_share import PlannedRun
from snugfit.planning.cost.timer import PerGpuTimers, TimersWithGaps, why_unknown
from snugfit.planning.fleet.gpu_plans import GpuPlans, OnGpu
from snugfit.planning.fleet.kinds import kinds_of, search_kinds
from snugfit.planning.fleet.per_gpu import PerGpuSearch, screen_recomputing
from snugfit.planning.keep import Free, Keep, Kept, kept_of
from snugfit.planning.plan import Counts
from snugfit.planning.request import fidelity_of, refuse_bad_request, refuse_what_cannot_be_called, start_of
from snugfit.planning.search.progress import Progress, Tell
from snugfit.planning.search.recomputing import RecomputingKinds
from snugfit.planning.search.space import Space, space_of
from snugfit.planning.search.state import SearchState, exclusion
from snugfit.prediction.device import policy_for
from snugfit.prediction.headroom import headroom_of
from snugfit.prediction.profile import Software, installed_versions
from snugfit.prediction.rates import rates_for
from snugfit.prediction.startup import STARTUP_RATES, StartupRates
from snugfit.prediction.worker_pool import Question, SpareProcesses, WorkerPool
from snugfit.techniques.technique import Fidelity

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.planning.cost.figures import Figures
    from snugfit.planning.cost.timer import Timer
    from snugfit.rehearsal.trace.trace import Trace
    from snugfit.techniques.recipe import Recipe

_IMPORTS = threading.Lock()
"""Lock around the construction of a space, which imports models: transformers' lazy modules are not
thread-safe."""

ClockOf = Callable[["Gpu"], Callable[["Trace"], float]]


def plan_gpus(
    job: Job,
    gpus: Iterable[Gpu | str] | None = None,
    *,
    headroom: int | str | None = None,
    fidelity: str | Fidelity = Fidelity.ROUNDS,
    objective: str = "speed",
    clock_of: ClockOf | None = None,
    workers: int | None = None,
    steps: int | None = None,
    once: StartupRates = STARTUP_RATES,
    start: Recipe | str | None = None,
    keep: Keep = None,
    free: Free = (),
    tell: Tell = lambda what: None,
) -> GpuPlans:
    """Return the best fitting recipe by `objective` on each of these GPUs, by default all of the table.

    `clock_of` returns a GPU's clock, the seconds of a trace on it; by default they follow from its rates.
    `headroom`, `fidelity`, `workers`, `steps`, `once`, `start`, `keep`, `free` and `tell` are those of a
    plan. A GPU with unknown seconds gets its smallest recipe. A GPU that is not CUDA's, or too old for the
    fixed techniques, gets no answer. Both get the reason. Raises `UsageError` for invalid arguments, and
    `SnugfitError` if no recipe of a space can be rehearsed.
    """
    from snugfit.planning.cost.parts_pool import can_travel, load_ahead

    refuse_bad_request(job, objective=objective, workers=workers)
    refuse_what_cannot_be_called(tell=tell)
    gpus, fidelity = _gpus_of(gpus), fidelity_of(fidelity)
    run = PlannedRun(steps=steps, rates=once)
    fixed = kept_of(job, keep, free, start_of(start, 0))
    fixed.refuse()
    workers = min(2, os.cpu_count() or 1) if workers is None else workers
    load_ahead(job, gpus, clock_of, workers, ahead=fixed.preloaded)
    kinds, answers = kinds_of(gpus, fixed, fidelity)
    margins = {gpu.key: headroom_of(headroom, gpu, one_of_many=True) for gpu in gpus if gpu.memory_bytes}
    side_by_side = min(workers, len(kinds)) if clock_of is None and can_travel(job) else 1
    spare = SpareProcesses()

    def search(kind: Sequence[Gpu], workers: int, tell: Tell) -> _KindAnswer:
        beside = spare if side_by_side > 1 else None
        return _search_kind(
            job, kind, margins, fidelity, fixed, objective, clock_of, workers, beside, run, tell
        )

    searched = search_kinds(search, kinds, workers=workers, side_by_side=side_by_side, spare=spare, tell=tell)
    answers |= {on_gpu.key: on_gpu for answer in searched for on_gpu in answer.on_gpus}
    return GpuPlans(
        job=job,
        fidelity=fidelity.value,
        objective=objective,
        steps=steps,
        answers=tuple(answers[gpu.key] for gpu in gpus),
        kept=fixed.listing(),
        counts=tuple(answer.counts for answer in searched),
        versions=installed_versions(),
    )


def _gpus_of(gpus: Iterable[Gpu | str] | None) -> list[Gpu]:
    """Return each GPU once, in the given order. Raises `UsageError` for an empty list."""
    named = all_gpus() if gpus is None else gpus
    if isinstance(named, str) or not isinstance(named, Iterable) or not (named := [*named]):
        raise UsageError(f"gpus is {gpus!r}; it must be a list such as ['h200', 'l4'], or None for all GPUs.")
    return list({gpu.key: gpu for gpu in map(find_gpu, named)}.values())


class _KindAnswer(NamedTuple):
    on_gpus: list[OnGpu]
    counts: Counts


def _search_kind(
    job: Job,
    gpus: Sequence[Gpu],
    headroom: Mapping[str, int],
    fidelity: Fidelity,
    fixed: Kept,
    objective: str,
    clock_of: ClockOf | None,
    workers: int,
    spare: SpareProcesses | None,
    run: PlannedRun,
    tell: Tell,
) -> _KindAnswer:
    """Return the answers for GPUs of one kind, searched by the policy of the one with the least scratch.

    `headroom` are the bytes that each leaves free, by key. If other kinds are searched concurrently, a
    worker works apart, and processes become `spare`.
    """
    from snugfit.planning.cost.parts_pool import with_pool

    gpus = sorted(gpus, key=lambda gpu: policy_for(gpu, Software()).scratch_size)
    timer = PerGpuTimers(tuple(map(clock_of, gpus))) if clock_of else TimersWithGaps.on(gpus)
    with _IMPORTS:
        capability = gpus[0].compute_capability
        space = space_of(job, fidelity=fidelity, capability=capability, fixed=fixed, many_gpus=True)

    def answer(pool: WorkerPool) -> _KindAnswer:
        searches = _search(space, pool, gpus, headroom, _smallest(objective, timer, len(gpus)), tell)
        answers = [_on_gpu(search, job, timed=clock_of is None) for search in searches]
        return _KindAnswer(answers, searches[0].state.counts())

    apart = spare is not None
    return with_pool(answer, job, gpus, timer, workers=workers, run=run, apart=apart, spare=spare, tell=tell)


def _smallest(objective: str, timer: Timer, gpus: int) -> list[bool]:
    """Return for each GPU True if its smallest recipe is needed: by request, or because its seconds are
    unknown."""
    indices = timer.indices if isinstance(timer, TimersWithGaps) else range(gpus)
    return [objective == "memory" or index is None for index in indices]


def _on_gpu(search: PerGpuSearch, job: Job, *, timed: bool) -> OnGpu:
    number = search.answer()
    why = why_unknown(search.gpu) if timed else ""
    rates = rates_for(search.gpu) if timed and not why else None
    figures = search.state.judged[number]
    peak = figures.peak_seconds if rates else 0.0
    return OnGpu(
        gpu=search.gpu,
        fits=figures.needed_bytes <= (search.gpu.memory_bytes or 0),
        headroom_bytes=search.headroom_bytes,
        choice=search.state.choice(number, job.batch_size),
        verified=search.own[number],
        rates=rates.source if rates else "",
        measured_rates=rates.measured if rates else None,
        mfu=peak / figures.step_seconds if peak else None,
        why=why,
        doubts=figures.doubts,
    )


# ---- the search ------------------------------------------------------------------------------------------


def _search(
    space: Space,
    pool: WorkerPool,
    gpus: Sequence[Gpu],
    headroom: Mapping[str, int],
    smallest: Sequence[bool],
    tell: Tell,
) -> list[PerGpuSearch]:
    """Return the finished search of each GPU."""
    states = [SearchState(space) for _ in gpus]
    (recomputing := RecomputingKinds(states, pool, tell)).add_others()
    scratch = [policy_for(gpu, Software()).scratch_size for gpu in gpus]
    takes_less = [any(own < judged for own, judged in zip(one, scratch[0], strict=True)) for one in scratch]
    searches = [
        PerGpuSearch(gpu, i, state, smallest[i], takes_less=takes_less[i], headroom_bytes=headroom[gpu.key])
        for i, (gpu, state) in enumerate(zip(gpus, states, strict=True))
    ]
    for search in searches:
        search.hold_back(recomputing)
    while True:
        _judge(space, pool, searches, tell)
        if screen_recomputing(recomputing, searches):
            continue
        if not states[0].judged:
            raise SnugfitError(f"No recipe could be simulated: {states[0].excluded[0].why}")
        if all(search.answer() in search.own for search in searches):
            return searches
        _simulate_answers(space, pool, searches, tell)


def _judge(space: Space, pool: WorkerPool, searches: Sequence[PerGpuSearch], tell: Tell) -> None:
    """Evaluate all open candidates of the GPUs until none is left.

    One worker evaluates traces that share their passes, and Setups of one trace together.
    """
    asked: dict[int, list[int]] = {}

    def ask(worker: int) -> Question | None:
        busy = {number for group in asked.values() for number in group}
        open_candidates = {
            number: space.candidates[number]
            for search in searches
            for number in search.open_candidates()
            if number not in busy
        }
        for number, candidate in open_candidates.items():
            if searches[0].state.is_for(worker, number):
                group = [n for n, other in open_candidates.items() if other.trace == candidate.trace]
                asked[number] = group
                return Question(number, "judge", ([space.candidates[n].setup for n in group],))
        return None

    for number, answer in pool.answers(ask):
        group = asked.pop(number)
        if isinstance(answer, SnugfitError):
            searches[0].state.excluded.append(exclusion(space, group, answer))
            for search in searches:
                search.exclude(group)
        else:
            for candidate, figures in zip(group, answer, strict=True):
                for search in searches:
                    search.learn(candidate, figures[search.index])
        undecided = sum(bool(search.open_candidates()) for search in searches)
        tell(f"{len(searches[0].state.judged)} recipes checked, {undecided} GPUs without an answer")


def _simulate_answers(space: Space, pool: WorkerPool, searches: Sequence[PerGpuSearch], tell: Tell) -> None:
    """Simulate each GPU's answer in full by its own policy. The plan reports these figures.

    GPUs with the same answer and the same kernels share a rehearsal. If an answer takes far more than the
    search found, it is also simulated by the search's policy, the first GPU's.
    """
    groups: dict[int, list[PerGpuSearch]] = defaultdict(list)
    for search in searches:
        if search.answer() not in search.own:
            groups[search.answer()].append(search)
    asked = {number: [search.index for search in group] for number, group in groups.items()}
    own = _whole(space, pool, asked, "simulating the answers in full", tell)
    unlike = [
        number
        for number, group in groups.items()
        if not all(s.may_be_own(number, figures) for s, figures in zip(group, own[number], strict=True))
    ]
    again = "simulating answers on the GPU that takes least"
    by_search = _whole(space, pool, {number: [0] for number in unlike}, again, tell)
    for number, group in groups.items():
        for search, figures in zip(group, own[number], strict=True):
            search.set_own(number, figures, *by_search.get(number, ()))


def _whole(
    space: Space, pool: WorkerPool, asked: Mapping[int, Sequence[int]], what: str, tell: Tell
) -> dict[int, list[Figures]]:
    """Return the figures of these candidates, simulated in full on the given GPUs.

    Candidates of one trace share a rehearsal.
    """
    by_trace: dict[int, list[int]] = defaultdict(list)
    for number in asked:
        by_trace[space.candidates[number].trace].append(number)
    questions = (
        Question(trace, "whole", ([(space.candidates[number].setup, asked[number]) for number in numbers],))
        for trace, numbers in by_trace.items()
    )
    if asked:
        tell(what)
    progress = Progress(what, len(by_trace), tell)
    whole: dict[int, list[Figures]] = {}
    for trace, answer in pool.answers_to(questions):
        progress.step()
        if isinstance(answer, SnugfitError):
            raise answer
        whole.update(zip(by_trace[trace], answer, strict=True))
    return whole
