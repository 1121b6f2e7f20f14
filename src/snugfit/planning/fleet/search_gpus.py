"""One search for many GPUs.

What a rehearsal writes down depends on few things about a GPU: which kernels it runs (its attention, its
grouped products), and a little on the workspaces and scratch of those. So GPUs that run the same kernels and
allow the same techniques are searched together, one rehearsal for all of them: each has seconds and a context
of its own for every recipe (`Parts`), and each decides for itself what is worth judging (`per_gpu.py`). The
answers are those that a plan for each GPU alone would give.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from snugfit.errors import GpuError, SnugfitError, UsageError
from snugfit.job.gpu import all_gpus, find_gpu
from snugfit.job.job import refuse_what_is_no_job
from snugfit.planning.cost.run import Run
from snugfit.planning.fleet.gpu_plans import GpuPlans, OnGpu
from snugfit.planning.fleet.many_timers import Each, Known, why_unknown
from snugfit.planning.fleet.per_gpu import Seat
from snugfit.planning.plan import Counts
from snugfit.planning.search.screening import Progress, Tell, exclusion, screened
from snugfit.planning.search.search import refuse
from snugfit.planning.search.space import Space, fidelity_of, space_of
from snugfit.planning.search.state import Searched
from snugfit.prediction.device import policy_for
from snugfit.prediction.profile import Software, installed_versions
from snugfit.prediction.rates import rates_for
from snugfit.prediction.startup import STARTUP_RATES, StartupRates
from snugfit.prediction.worker_pool import Question, WorkerPool
from snugfit.techniques import roster
from snugfit.techniques.technique import Fidelity

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.planning.cost.timer import Clock
    from snugfit.rehearsal.trace.trace import Trace

ClockOf = Callable[["Gpu"], Callable[["Trace"], float]]


def plan_gpus(
    job: Job,
    gpus: Iterable[Gpu | str] | None = None,
    *,
    fidelity: str | Fidelity = Fidelity.ROUNDS,
    objective: str = "speed",
    clock_of: ClockOf | None = None,
    workers: int | None = None,
    steps: int | None = None,
    once: StartupRates = STARTUP_RATES,
    tell: Tell = lambda what: None,
) -> GpuPlans:
    """On each of these GPUs, by default all of the table, the recipe that `objective` asks for among those
    that fit it.

    `clock_of` gives a GPU's clock, the seconds of a trace on it; by default its rates tell. `fidelity`,
    `workers`, `steps`, `once` and `tell` are as for a plan. A GPU whose seconds are not known gets its
    smallest recipe, and one that is not CUDA's no answer, each with the reason. Raises `UsageError` for what
    cannot be, and `SnugfitError` when no recipe of a space can be rehearsed.
    """
    refuse_what_is_no_job(job)
    gpus, fidelity = _found(gpus), fidelity_of(fidelity)
    refuse(objective, None, workers)
    run = Run(steps=steps, rate=once)
    workers = min(2, os.cpu_count() or 1) if workers is None else workers
    answers: dict[str, OnGpu] = {}
    groups: dict[Hashable, list[Gpu]] = defaultdict(list)
    for gpu in gpus:
        try:
            groups[_kind(gpu)].append(gpu)
        except GpuError as unknown:
            answers[gpu.key] = OnGpu(gpu=gpu, fits=None, why=str(unknown))
    counts = []
    began = time.monotonic()
    for number, group in enumerate(groups.values()):
        told = _telling(tell, number, len(groups), len(group), began)
        found, looked = _group(job, group, fidelity, objective, clock_of, workers, run, told)
        answers |= {answer.key: answer for answer in found}
        counts.append(looked)
    return GpuPlans(
        job=job,
        fidelity=fidelity.value,
        objective=objective,
        steps=steps,
        answers=tuple(answers[gpu.key] for gpu in gpus),
        counts=tuple(counts),
        versions=installed_versions(),
    )


def _found(gpus: Iterable[Gpu | str] | None) -> list[Gpu]:
    """Each GPU once, in the order in which they were named. Raises `UsageError` where none is."""
    named = all_gpus() if gpus is None else gpus
    if isinstance(named, str) or not isinstance(named, Iterable) or not (named := [*named]):
        raise UsageError(f"gpus is {gpus!r}; it is a list such as ['h200', 'l4'], or None for all of them.")
    return list({gpu.key: gpu for gpu in map(find_gpu, named)}.values())


def _kind(gpu: Gpu) -> Hashable:
    """Equal for GPUs that one search can serve: they run the same kernels and allow the same techniques."""
    policy = policy_for(gpu, Software())
    if gpu.memory_bytes is None:
        raise GpuError(f"{gpu.name}: how much memory processes can use is not in the table.")
    allowed = tuple(
        found.name
        for found in roster.techniques()
        if found.least_capability is None or policy.capability >= found.least_capability
    )
    return policy.decisions, allowed


def _telling(tell: Tell, number: int, groups: int, gpus: int, began: float) -> Tell:
    """Tells which kind of GPUs is being looked pool, and from the second on how long the others may take."""
    each = (time.monotonic() - began) / number if number else 0.0
    rest = f", then about {each * (groups - number - 1):.0f} s more" if number + 1 < groups and number else ""
    head = f"GPUs of kind {number + 1} of {groups} ({gpus} of them): "
    return lambda what: tell(f"{head}{what}{rest}")


def _group(
    job: Job,
    gpus: Sequence[Gpu],
    fidelity: Fidelity,
    objective: str,
    clock_of: ClockOf | None,
    workers: int,
    run: Run,
    tell: Tell,
) -> tuple[list[OnGpu], Counts]:
    """The answers for GPUs of one kind. The one that takes least goes first, and the rehearsal is its."""
    from snugfit.planning.cost.parts_pool import with_pool

    gpus = sorted(gpus, key=lambda gpu: policy_for(gpu, Software()).scratch_size)
    clock = Each(tuple(map(clock_of, gpus))) if clock_of else Known.on(gpus)
    space = space_of(job, fidelity=fidelity, capability=gpus[0].compute_capability)

    def answers(pool: WorkerPool) -> tuple[list[OnGpu], Counts]:
        seats = _search(space, pool, gpus, _smallest(objective, clock, len(gpus)), tell)
        return [_on_gpu(seat, job, timed=clock_of is None) for seat in seats], seats[0].found.counts()

    return with_pool(answers, job, gpus, clock, workers=workers, run=run, tell=tell)


def _smallest(objective: str, clock: Clock, gpus: int) -> list[bool]:
    """Of each GPU whether its smallest recipe is asked for: by the user, or because its seconds are not
    known."""
    known = clock.places if isinstance(clock, Known) else range(gpus)
    return [objective == "memory" or place is None for place in known]


def _on_gpu(seat: Seat, job: Job, *, timed: bool) -> OnGpu:
    number = seat.answer()
    why = why_unknown(seat.gpu) if timed else ""
    rates = rates_for(seat.gpu) if timed and not why else None
    return OnGpu(
        gpu=seat.gpu,
        fits=seat.fits(number),
        choice=seat.found.choice(number, job.batch_size),
        verified=seat.own[number],
        rates=rates.source if rates else "",
        measured_rates=rates.measured if rates else None,
        why=why,
    )


# ---- the search ------------------------------------------------------------------------------------------


def _search(
    space: Space, pool: WorkerPool, gpus: Sequence[Gpu], smallest: Sequence[bool], tell: Tell
) -> list[Seat]:
    """Every GPU's seat, each with an answer of its own."""
    seen = screened(space, pool, tell)
    seats = []
    for place, gpu in enumerate(gpus):
        bounds = {number: each[place] for number, each in seen.bounds.items()}
        found = Searched(space, bounds, excluded=seen.excluded, kinds=seen.kinds)
        seats.append(Seat(gpu, place, found, smallest=smallest[place]))
    while True:
        _judge(space, pool, seats, tell)
        if not seats[0].found.judged:
            raise SnugfitError(f"No recipe could be simulated: {seen.excluded[0].why}")
        if all(seat.answer() in seat.own for seat in seats):
            return seats
        _settle(space, pool, seats, tell)


def _judge(space: Space, pool: WorkerPool, seats: Sequence[Seat], tell: Tell) -> None:
    """Judges whatever a seat wants, until none wants anything: traces that share their passes in one place,
    and Setups of one trace together."""
    asked: dict[int, list[int]] = {}
    homes: dict[int, int] = {}

    def ask(worker: int) -> Question | None:
        busy = {number for group in asked.values() for number in group}
        wanted = {number: None for seat in seats for number in seat.wants() if number not in busy}
        for number in wanted:
            this = space.candidates[number]
            if homes.setdefault(this.sized, worker) == worker:
                asked[number] = [each for each in wanted if space.candidates[each].trace == this.trace]
                return Question(number, "judge", ([space.candidates[each].setup for each in asked[number]],))
        return None

    for number, answer in pool.answers(ask):
        group = asked.pop(number)
        if isinstance(answer, SnugfitError):
            seats[0].found.excluded.append(exclusion([space.candidates[each] for each in group], answer))
        for seat in seats:
            if isinstance(answer, SnugfitError):
                seat.leave_out(group)
                continue
            for each, figures in zip(group, answer, strict=True):
                seat.found.judge(each, figures[seat.place])
        left = sum(next(seat.wants(), None) is not None for seat in seats)
        tell(f"{len(seats[0].found.judged)} recipes judged, {left} GPUs left")


def _settle(space: Space, pool: WorkerPool, seats: Sequence[Seat], tell: Tell) -> None:
    """Rehearses each seat's answer whole by its GPU's own policy, once for GPUs whose policy is the same:
    they have one trace. Those are the figures that are stated."""
    alike: dict[Hashable, list[Seat]] = defaultdict(list)
    for seat in seats:
        if seat.answer() not in seat.own:
            alike[seat.answer(), policy_for(seat.gpu, Software())].append(seat)
    groups = list(alike.values())
    todo = deque(enumerate(groups))
    progress = Progress("simulating the answers in full", len(groups), tell)

    def ask(worker: int) -> Question | None:
        if not todo:
            return None
        index, group = todo.popleft()
        setup = space.candidates[group[0].answer()].setup
        return Question(index, "whole", (setup, [seat.place for seat in group]))

    for index, answer in pool.answers(ask):
        progress.step()
        if isinstance(answer, SnugfitError):
            raise answer
        for seat, figures in zip(groups[index], answer, strict=True):
            seat.settle(seat.answer(), figures)
