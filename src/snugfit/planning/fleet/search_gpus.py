"""Plan for many GPU models, with one search for those that run the same kernels.

A simulated step depends on the GPU's kernels (attention, grouped matrix products), and slightly on their
workspaces and temporary buffers. GPUs that run the same kernels and allow the same techniques are therefore
searched together, with one simulation for all of them. Each has separate seconds and a separate CUDA context
for every recipe (`Parts`). Each GPU then has its own search (`search/search.py`), which ends with its best
recipe and needs no Pareto front. Results of an earlier search are reused (`shared_pool.py`). The best recipes
equal those of separate plans.

GPUs of one group run the same kernels, with workspaces and temporary buffers of different sizes. The searches
use the sizes of the GPU that needs the fewest bytes. Each best recipe is then simulated in full with the
GPU's own sizes (`Parts.whole`). If it does not fit, the search continues. Recipes with the same forward and
backward passes have the same workspaces and temporary buffers. So the difference in bytes applies to all of
them.

Many GPUs run different kernels only for wide attention heads, or for grouped products of experts. They are
searched together too, until a simulation depends on such a difference (`CudaPolicy.peers`). Then each group
has a separate search.

**Shared results.** A cache of workers' results, which the searches for several GPUs with the same kernels
share.

The workers' `Parts` return lower bounds, and exact bytes and seconds, for all GPUs of the group. The search
for one GPU reads only its own values. The search for the next GPU reuses cached results, and its workers
compute only the rest.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.errors import SnugfitError, UsageError
from snugfit.job.gpu import all_gpus, find_gpu
from snugfit.planning.cost.timer import PerGpuTimers, TimersWithGaps, why_unknown
from snugfit.planning.fleet.gpu_plans import GpuPlans, OnGpu
from snugfit.planning.fleet.kinds import kinds_of, search_kinds
from snugfit.planning.keep import Free, Keep
from snugfit.planning.plan import EXTRA_BYTES_SHARE, Counts, nearest_miss
from snugfit.planning.search.plan_request import PlanRequest
from snugfit.planning.search.progress import Progress, Tell
from snugfit.planning.search.search import best_of, front_of, search
from snugfit.planning.search.simpler import AS_FAST
from snugfit.planning.search.space import Space, space_of
from snugfit.planning.search.state import SearchState
from snugfit.prediction.device import policy_for
from snugfit.prediction.profile import Software, installed_versions
from snugfit.prediction.rates import rates_for
from snugfit.prediction.startup import STARTUP_RATES, StartupRates
from snugfit.prediction.worker_pool import CallResult, Question, SpareProcesses, WorkerPool
from snugfit.rehearsal.device.policy import PoliciesDiffer
from snugfit.techniques.technique import Fidelity

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.planning.cost.figures import Figures
    from snugfit.planning.cost.timer import Timer
    from snugfit.planning.search.recomputing import RecomputingKinds
    from snugfit.rehearsal.trace.trace import Trace
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.setup import Setup


_IMPORTS = threading.Lock()
"""Lock around the construction of a search space, which imports models. transformers' lazy imports are not
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
    tell: Tell = lambda message: None,
) -> GpuPlans:
    """Return the best fitting recipe by `objective` on each of these GPUs, by default on all GPUs of the
    table.

    `clock_of` returns, for a GPU, a function from traces to seconds. Without it, seconds follow from the
    GPU's rates. `headroom`, `fidelity`, `workers`, `steps`, `once`, `start`, `keep`, `free` and `tell` are
    those of `plan`. A GPU with unknown seconds gets the recipe with the least memory. A GPU without CUDA, or
    too old for the fixed techniques, gets none. Both results contain the reason. Raises `UsageError` for
    invalid arguments, and `SnugfitError` if no recipe can be simulated.
    """
    from snugfit.planning.cost.parts_pool import can_travel

    gpus = gpus_of(gpus)
    request = PlanRequest.of(
        job, gpus, headroom=headroom, fidelity=fidelity, objective=objective, keep=keep, free=free,
        start=start, steps=steps, once=once, workers=workers, tell=tell, compares=True,
    )  # fmt: skip
    workers = request.workers
    request.load_ahead(clock_of)
    kinds, answers = kinds_of(gpus, request.fixed, request.fidelity)
    side_by_side = min(workers, len(kinds)) if clock_of is None and can_travel(job) else 1
    spare = SpareProcesses()

    def search_kind(kind: Sequence[Gpu], workers: int, tell: Tell) -> _KindPlans:
        beside = spare if side_by_side > 1 else None
        return _search_kind(replace(request, gpus=kind, workers=workers, tell=tell), clock_of, beside)

    searched = search_kinds(
        search_kind, kinds, workers=workers, side_by_side=side_by_side, spare=spare, tell=tell
    )
    answers |= {on_gpu.key: on_gpu for answer in searched for on_gpu in answer.on_gpus}
    return GpuPlans(
        job=job,
        fidelity=request.fidelity.value,
        objective=objective,
        steps=steps,
        answers=tuple(answers[gpu.key] for gpu in gpus),
        kept=request.fixed.listing(),
        counts=tuple(answer.counts for answer in searched),
        versions=installed_versions(),
    )


def gpus_of(gpus: Iterable[Gpu | str] | None) -> list[Gpu]:
    """Return each GPU once, in the given order. Raises `UsageError` for an empty list."""
    named = all_gpus() if gpus is None else gpus
    if isinstance(named, str) or not isinstance(named, Iterable) or not (named := [*named]):
        raise UsageError(f"gpus is {gpus!r}; it must be a list such as ['h200', 'l4'], or None for all GPUs.")
    return list({gpu.key: gpu for gpu in map(find_gpu, named)}.values())


class _KindPlans(NamedTuple):
    on_gpus: list[OnGpu]
    counts: Counts


def _search_kind(request: PlanRequest, clock_of: ClockOf | None, spare: SpareProcesses | None) -> _KindPlans:
    """Search the best recipes for GPUs that run the same kernels. The simulation imitates the GPU whose
    kernels need the least temporary memory.

    If other groups are searched concurrently, each worker has its own process, and `spare` counts processes
    that may help.
    """
    gpus = sorted(request.gpus, key=lambda gpu: policy_for(gpu, Software()).scratch_size)
    request, job, tell = replace(request, gpus=gpus), request.job, request.tell
    timer = PerGpuTimers(tuple(map(clock_of, gpus))) if clock_of else TimersWithGaps.on(gpus)
    headroom = {gpu.key: request.headroom_on(gpu) for gpu in gpus}
    with _IMPORTS:
        capability = gpus[0].compute_capability
        space = space_of(
            job, fidelity=request.fidelity, capability=capability, fixed=request.fixed, many_gpus=True
        )

    def answer(pool: WorkerPool) -> _KindPlans:
        searches = search_each(space, pool, gpus, headroom, _smallest(request, timer), tell)
        answers = [_on_gpu(gpu_search, job, timed=clock_of is None) for gpu_search in searches]
        return _KindPlans(answers, _counts(searches))

    return request.with_pool(answer, timer, spare)


def _smallest(request: PlanRequest, timer: Timer) -> list[bool]:
    """Return, for each GPU, True if its search is for the least memory: by request, or because its seconds
    are unknown.
    """
    indices = timer.indices if isinstance(timer, TimersWithGaps) else range(len(request.gpus))
    return [request.wants_smallest or index is None for index in indices]


def _counts(searches: Sequence[SearchOfGpu]) -> Counts:
    """Return the numbers of recipes that all these searches considered and simulated."""
    states = [gpu_search.state for gpu_search in searches]
    candidates = states[0].space.candidates
    return replace(
        states[0].counts(),
        passes=len({candidates[number].passes for state in states for number in state.bounds}),
        replayed=len({number for state in states for number in state.evaluated}),
    )


def _on_gpu(gpu_search: SearchOfGpu, job: Job, *, timed: bool) -> OnGpu:
    reason = why_unknown(gpu_search.gpu) if timed else ""
    rates = rates_for(gpu_search.gpu) if timed and not reason else None
    figures = gpu_search.state.evaluated[gpu_search.answer]
    peak = figures.peak_seconds if rates else 0.0
    return OnGpu(
        gpu=gpu_search.gpu,
        fits=figures.needed_bytes <= gpu_search.memory_bytes,
        headroom_bytes=gpu_search.headroom_bytes,
        choice=gpu_search.state.choice(gpu_search.answer, job.batch_size),
        verified=gpu_search.verified,
        rates=rates.source if rates else "",
        measured_rates=rates.measured if rates else None,
        mfu=peak / figures.step_seconds if peak else None,
        why=reason,
        doubts=figures.doubts,
    )


# ---- the search ------------------------------------------------------------------------------------------


SAME_SECONDS = 1e-9
"""Largest relative difference at which two sums of the same kernels' seconds count as equal. Sums in
different orders differ by rounding.
"""


class SearchOfGpu:
    """Search for the best recipe on one GPU, repeated until a full simulation for this GPU confirms the
    result.
    """

    def __init__(
        self, space: Space, pool: WorkerPool, gpu: Gpu, headroom_bytes: int, *, smallest: bool, tell: Tell
    ) -> None:
        self.gpu, self.headroom_bytes, self.memory_bytes = gpu, headroom_bytes, gpu.memory_bytes or 0
        self._pool, self._smallest, self._tell = pool, smallest, tell
        self.state = SearchState(
            space,
            memory_bytes=self.memory_bytes - headroom_bytes,
            beyond=EXTRA_BYTES_SHARE,
            nearly=0.0 if smallest else EXTRA_BYTES_SHARE,
            slowest=1 + AS_FAST,
        )
        # If only the smallest recipe is needed, no candidate belongs on the Pareto front.
        self.state.most_bytes = 0 if smallest else self.memory_bytes - headroom_bytes
        self._kinds: RecomputingKinds | None = None
        self._found: dict[int, Figures] = {}
        """Bytes and seconds from the search, by recipe number. It has only recipes whose bytes were later
        corrected for this GPU.
        """
        self._more: dict[Hashable, list[int]] = {}
        """Bytes to add to the search's bytes for this GPU's own workspaces, by the recipe's forward and
        backward passes.
        """
        self.answer = -1
        self.verified: bool | None = None
        """True if the full simulation of the best recipe confirmed the search; None before that
        simulation."""

    def run(self) -> None:
        """Search for the best recipe on this GPU, with the corrected bytes known so far, and set `answer`."""
        state, before = self.state, self.answer
        while True:
            self._kinds = search(state, self._pool, self._tell, smallest=self._smallest, kinds=self._kinds)
            front = front_of(state)
            best = best_of(state, self._pool, front, self.memory_bytes, smallest=self._smallest)
            sizes = [state.evaluated[number].needed_bytes for number in front]
            miss = nearest_miss(sizes, "memory" if self._smallest else "speed")
            self.answer = front[miss] if best is None else best
            # Corrected bytes may make another recipe the best, so the search continues with them.
            if not self._add_own_bytes():
                break
        if self.answer != before:
            self.verified = None

    def learn(self, by_search: Figures, own: Figures) -> None:
        """Store the results of two full simulations of the best recipe. `by_search` is for the GPU that
        represents the group, `own` for this GPU.
        """
        number, state = self.answer, self.state
        figures = self._found.setdefault(number, state.evaluated[number])
        as_long = math.isclose(own.seconds, figures.seconds, rel_tol=SAME_SECONDS)
        self.verified = as_long and by_search[:3] == figures[:3]
        if self.verified:
            more = [exact - two for exact, two in zip(own[:3], by_search[:3], strict=True)]
            self._more.setdefault(state.passes_of(number), more)
        state.correct({number: own})
        self._add_own_bytes()

    def _add_own_bytes(self) -> bool:
        """Add the additional bytes of this GPU's workspaces to all recipes with the best recipe's forward and
        backward passes. Return True if they were added to the best recipe.
        """
        number, state = self.answer, self.state
        more = self._more.get(state.passes_of(number), ())
        without = {number, *state.siblings(number)}.difference(self._found) if any(more) else set()
        corrected = {}
        for other in without:
            figures = self._found[other] = state.evaluated[other]
            requested, allocated, reserved = (a + b for a, b in zip(figures[:3], more, strict=True))
            corrected[other] = figures._replace(
                requested_bytes=requested, allocated_bytes=allocated, reserved_bytes=reserved
            )
        state.correct(corrected)
        return number in without


def search_each(
    space: Space,
    pool: WorkerPool,
    gpus: Sequence[Gpu],
    headroom: Mapping[str, int],
    smallest: Sequence[bool],
    tell: Tell,
) -> list[SearchOfGpu]:
    """Search the best recipe for each GPU, until its result is simulated in full. Return the searches."""
    results = SharedResults(pool)
    workers: dict[int, int] = {}
    searches = []
    for index, gpu in enumerate(gpus):

        def callback_for(message: str, begun: str = f"GPU {index + 1} of {len(gpus)}: ") -> None:
            tell(begun + message)

        gpu_search = SearchOfGpu(
            space, results.of_gpu(index), gpu, headroom[gpu.key], smallest=smallest[index], tell=callback_for
        )
        # The searches share the worker processes, and so the simulations that each worker has cached.
        gpu_search.state.worker_of = workers
        searches.append(gpu_search)
    # If a search's best recipe changed after its full simulation, the new one is simulated too.
    while unsettled := [index for index, gpu_search in enumerate(searches) if gpu_search.verified is None]:
        for index in unsettled:
            searches[index].run()
        _simulate_answers(space, pool, {index: searches[index] for index in unsettled}, tell)
        for index in unsettled:
            searches[index].run()
    return searches


def _simulate_answers(
    space: Space, pool: WorkerPool, searches: Mapping[int, SearchOfGpu], tell: Tell
) -> None:
    """Simulate the best recipe of each GPU in full, with the sizes of that GPU and of the searches' GPU, the
    first.

    The plan reports these bytes and seconds. GPUs with the same best recipe share a simulation, and so do
    recipes with the same trace.
    """
    indices: dict[int, list[int]] = defaultdict(list)
    for index, gpu_search in searches.items():
        indices[gpu_search.answer].append(index)
    by_trace: dict[int, list[int]] = defaultdict(list)
    for number in indices:
        by_trace[space.candidates[number].trace].append(number)
    questions = (
        Question(
            trace,
            "whole",
            ([(space.candidates[number].setup, [0, *indices[number]]) for number in numbers],),
        )
        for trace, numbers in by_trace.items()
    )
    progress = Progress("simulating the answers in full", len(by_trace), tell)
    for trace, value in pool.answers_to(questions):
        progress.step()
        if isinstance(value, SnugfitError):
            raise value
        for number, (by_search, *owns) in zip(by_trace[trace], value, strict=True):
            for index, own in zip(indices[number], owns, strict=True):
                searches[index].learn(by_search, own)


# ---- shared results ----------------------------------------------------------------------------------------


class SharedResults:
    """Cache of simulation results by method of `Parts` and by a recipe's `Setup`. A search space contains
    each Setup object once, so its id is the key.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self._known: dict[tuple[str, int], Any] = {}

    def of_gpu(self, index: int) -> WorkerPool:
        """Return a worker pool that returns only the results for the GPU with this index."""
        return _PoolOfGpu(self, index)

    def setups_to_run(self, question: Question) -> list[Setup]:
        """Return the Setups of this method call whose results are not in the cache."""
        (setups,) = question.arguments
        return [setup for setup in setups if (question.method, id(setup)) not in self._known]

    def learn(self, question: Question, value: Any) -> None:
        """Add a worker's results of a method call to the cache, or its error for each Setup. Raises
        `PoliciesDiffer` if the GPUs run different kernels.
        """
        if isinstance(value, PoliciesDiffer):
            raise value
        (setups,) = question.arguments
        values = [value] * len(setups) if isinstance(value, SnugfitError) else value
        self._known |= {
            (question.method, id(setup)): result for setup, result in zip(setups, values, strict=True)
        }

    def value(self, question: Question, index: int) -> Any:
        """Return the cached results for the GPU `index`, one for each Setup of the method call. Return a
        single error if all have the same one, or if any exact evaluation (`evaluate`) failed.
        """
        (setups,) = question.arguments
        values = [self._known[question.method, id(setup)] for setup in setups]
        errors = [value for value in values if isinstance(value, SnugfitError)]
        if errors and (question.method == "evaluate" or all(value is errors[0] for value in values)):
            return errors[0]
        return [value if isinstance(value, SnugfitError) else value[index : index + 1] for value in values]


class _PoolOfGpu(WorkerPool):
    """Worker pool for the search of one GPU, which sends method calls to workers only without a cached
    result."""

    def __init__(self, results: SharedResults, index: int) -> None:
        super().__init__(results.pool.workers)
        self._results, self._index = results, index

    def results(
        self, next_call: Callable[[int], Question | None], *, helped: bool = False
    ) -> Iterator[CallResult]:
        """Yield the results of method calls as `WorkerPool.results` does; cached results need no worker."""
        pending: dict[int, tuple[Question, Question]] = {}
        known: list[Question] = []

        def request_rest(worker: int) -> Question | None:
            # A known answer is delivered before the worker gets a further question.
            if known or (question := next_call(worker)) is None:
                return None
            if not (setups := self._results.setups_to_run(question)):
                known.append(question)
                return None
            rest = question._replace(arguments=(setups,))
            pending[question.number] = question, rest
            return rest

        while True:
            for number, value in self._results.pool.results(request_rest, helped=helped):
                question, rest = pending.pop(number)
                self._results.learn(rest, value)
                yield CallResult(number, self._results.value(question, self._index))
            if not known:
                return
            question = known.pop()
            yield CallResult(question.number, self._results.value(question, self._index))
