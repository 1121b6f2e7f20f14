"""Search for the number of cards: the fewest of each kind of GPU that fit, and cheaper larger numbers.

Each GPU needs less memory if there are more of them. Bisection therefore finds the fewest that fit, with
the most recomputation and single samples. For this number the fastest recipe is searched as in
`snugfit plan --gpus`. The search continues with each larger number, as long as a step takes fewer GPU
seconds. Two rules keep it short:

- Simulated recipes bound others (`several_gpus/evidence.py`). A way to share the work that cannot take
  fewer GPU seconds than the best answer is skipped.
- Kinds that run the same kernels are searched together, and share each rehearsal.

Bytes and seconds are those of few layers and few micro-batches (`several_gpus/judge.py`). Nothing is
simulated in full: for a deep model and hundreds of micro-batches that takes minutes per answer.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from snugfit.errors import GpuError, UsageError
from snugfit.job.gpu import Gpu, all_gpus, find_gpu
from snugfit.job.job import Job
from snugfit.planning.fleet.cards import CardPlans, CardsOfKind
from snugfit.planning.keep import Free, Keep, Kept, kept_of
from snugfit.planning.plan import Exclusion
from snugfit.planning.request import fidelity_of, refuse_bad_request
from snugfit.planning.several_gpus.asking import Asked, Asking, choose_base, counts_of
from snugfit.planning.several_gpus.building import built_where_it_fits
from snugfit.planning.several_gpus.candidates import Shared, cuts, ways
from snugfit.planning.several_gpus.evidence import CutStep, Evidence
from snugfit.planning.several_gpus.fastest import Outcome, refusable, size_of
from snugfit.planning.several_gpus.judge import Judge, Judged
from snugfit.planning.several_gpus.meshes import GAIN, FastestMesh
from snugfit.planning.several_gpus.plan import OnGpus
from snugfit.planning.several_gpus.reasons import doubts_about_mesh, why_mesh
from snugfit.planning.several_gpus.search import Tell
from snugfit.planning.several_gpus.sharings import MOST_AXES
from snugfit.prediction.device import policy_for
from snugfit.prediction.headroom import headroom_of
from snugfit.prediction.profile import Software, installed_versions
from snugfit.prediction.rates import rates_for
from snugfit.prediction.worker_pool import Question, WorkerPool, worker_pool
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity

PATIENCE = 2
"""Number of consecutive counts of GPUs that are not cheaper, after which the search ends (chosen)."""


def plan_cards(
    job: Job,
    gpus: Iterable[Gpu | str] | None = None,
    *,
    counts: int | Sequence[int],
    headroom: int | str | None = None,
    fidelity: str | Fidelity = Fidelity.ROUNDS,
    keep: Keep = None,
    free: Free = (),
    workers: int | None = None,
    tell: Tell = lambda what: None,
) -> CardPlans:
    """Return the fewest GPUs of each kind that train the job, and larger numbers that take fewer GPU seconds.

    `gpus` are the kinds, by default all of the table, and `counts` the allowed numbers. The global batch
    stays unchanged. All other arguments are those of `plan_several_gpus`. A kind whose bytes or seconds
    are unknown gets no answer, with the reason. Raises `UsageError` for invalid arguments.
    """
    refuse_bad_request(job, workers=workers)
    kinds = list({gpu.key: gpu for gpu in map(find_gpu, all_gpus() if gpus is None else gpus)}.values())
    fixed = replace(kept_of(job, keep, free, None), several_gpus=True)
    fixed.refuse()
    even, uneven = _shared_evenly(counts, job, fixed)
    known, answers = _with_figures(kinds, fixed)
    workers = min(2, os.cpu_count() or 1) if workers is None else workers
    asked = partial(_KindSearch, job, even, fixed, fidelity_of(fidelity))
    searches = [asked(gpu, headroom_of(headroom, gpu, one_of_many=True)) for gpu in known]
    screened = 0
    if searches:
        with worker_pool(partial(Judge, job, *known), workers=workers) as pool:
            screened = _search_together(searches, pool, tell)
    answers |= {one.gpu.key: one.answer for one in searches if one.answer}
    refused = {what: why for one in searches for what, why in one.refused.items()}
    return CardPlans(
        job=job,
        fidelity=fidelity_of(fidelity).value,
        gpus=tuple(even),
        uneven=tuple(uneven),
        answers=tuple(answers[gpu.key] for gpu in kinds),
        kept_slots=fixed.listing(),
        refused=tuple(Exclusion(what=what, why=why) for what, why in refused.items()),
        screened=screened,
        doubts=tuple(dict.fromkeys(doubt for one in searches for doubt in one.doubts)),
        versions=installed_versions(),
    )


def _shared_evenly(counts: int | Sequence[int], job: Job, fixed: Kept) -> tuple[list[int], list[int]]:
    """Return the numbers of GPUs that divide the job's batch evenly, and those that do not.

    Raises `UsageError` if several were requested and only a single GPU remains.
    """
    even = counts_of(counts, job, fixed)
    named = sorted({counts} if isinstance(counts, int) else set(counts))
    uneven = [count for count in named if count not in even]
    if even == [1] and uneven:
        step = uneven[0]
        below = job.batch_size // step * step
        near = " or ".join(str(size) for size in (below, below + step) if size)
        raise UsageError(
            f"A global batch of {job.batch_size} cannot be shared evenly by {', '.join(map(str, uneven))} "
            f"GPUs. Try a batch of {near}, or name numbers of GPUs that divide it."
        )
    return even, uneven


def _with_figures(kinds: Sequence[Gpu], fixed: Kept) -> tuple[list[Gpu], dict[str, CardsOfKind]]:
    """Return the kinds with known bytes and seconds, and answers with the reason for all other kinds, by
    key."""
    known, answers = [], {}
    for gpu in kinds:
        try:
            policy_for(gpu, Software())
            rates_for(gpu)
            if gpu.memory_bytes is None:
                raise GpuError(f"{gpu.name}: the table has no figure for the memory that a process can use.")
            if why := fixed.too_new(gpu.compute_capability):
                raise GpuError(f"{gpu.name}: {why}")
            known.append(gpu)
        except GpuError as unknown:
            answers[gpu.key] = CardsOfKind(gpu=gpu, fits=None, why=str(unknown))
    return known, answers


# ---- many kinds at once ------------------------------------------------------------------------------------


class _Same(NamedTuple):
    """Properties that kinds must share to use one rehearsal."""

    decisions: Hashable
    build_on: str
    gpus: int
    recipe: Recipe


def _search_together(searches: Sequence[_KindSearch], pool: WorkerPool, tell: Tell) -> int:
    """Run the searches of all kinds until each has its answer. Return the number of simulated recipes."""
    screened = 0
    running = {index: search.run() for index, search in enumerate(searches)}
    decisions = [policy_for(search.gpu, Software()).decisions for search in searches]
    asked_by_kind = {index: next(asking) for index, asking in running.items()}
    while asked_by_kind:
        together: dict[_Same, list[int]] = defaultdict(list)
        for index, asked in asked_by_kind.items():
            for gpus, recipe in asked:
                if (gpus, recipe) not in searches[index].known:
                    together[_Same(decisions[index], searches[index].build_on, gpus, recipe)].append(index)
        questions = list(together.items())
        tell(
            f"simulating {len(questions)} recipes on few layers, {screened} done, {len(asked_by_kind)} of "
            f"{len(searches)} kinds of GPU without an answer"
        )
        for answer in pool.answers_to(
            Question(number, "judge_kinds", (same.gpus, same.recipe, tuple(kinds), same.build_on))
            for number, (same, kinds) in enumerate(questions)
        ):
            same, kinds = questions[answer.number]
            for index, judged in zip(kinds, answer.value, strict=True):
                searches[index].known[same.gpus, same.recipe] = judged
        screened += len(questions)
        asked_by_kind = dict(_next_questions(searches, running, asked_by_kind))
    return screened


def _next_questions(
    searches: Sequence[_KindSearch], running: dict[int, Asking[None]], answered: dict[int, Asked]
) -> Iterator[tuple[int, Asked]]:
    """Yield the next requests of all unfinished kinds, after sending them the results."""
    for index, asked in answered.items():
        judged = [searches[index].known[question] for question in asked]
        try:
            yield index, running[index].send(judged)
        except StopIteration:
            continue


# ---- one kind ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fastest:
    """The fastest recipe on a number of GPUs, or the nearest miss."""

    gpus: int
    recipe: Recipe
    judged: Judged
    shared: Shared
    why: str = ""
    """Reason for a mesh (`why_mesh`)."""


class _KindSearch:
    """The search for one kind of GPU: its requests and their results."""

    def __init__(
        self, job: Job, counts: Sequence[int], fixed: Kept, fidelity: Fidelity, gpu: Gpu, headroom: int
    ) -> None:
        self._counts, self._fixed, self._fidelity = counts, fixed, fidelity
        self.gpu, self._headroom = gpu, headroom
        self._bound = (gpu.memory_bytes or 0) - headroom
        self._job = built_where_it_fits(job, self._bound)
        self.known: dict[tuple[int, Recipe], Judged] = {}
        self.answer: CardsOfKind | None = None
        self.refused: dict[str, str] = {}
        self.doubts: dict[str, None] = {}
        self._evidence = Evidence(self._bound)

    @property
    def build_on(self) -> str:
        """Device that builds the model (`Job.build_on`)."""
        return self._job.build_on

    def run(self) -> Asking[None]:
        """Yield requests until there is an `answer`."""
        base = yield from choose_base(self._job, self._counts, self._fixed, self._fidelity)
        first = yield from self._first_that_fits(base)
        if isinstance(first, _Fastest):
            self._conclude([first], (), fits=False)
            return
        answers: list[_Fastest] = []
        dearer: list[int] = []
        search = FastestMesh(self._job, base, self._fixed, self._evidence, self.refused)
        least = math.inf
        for count in self._counts[first:]:
            limit, is_mesh = least / count, bool(answers and answers[-1].shared.mesh)
            outcome = yield from search.run(count, limit, limit if is_mesh else GAIN * limit)
            if outcome.fitting:
                answers.append(self._answer_of(count, outcome))
                least, dearer = count * answers[-1].judged.step_seconds, []
            elif answers:
                dearer.append(count)
            if len(dearer) == PATIENCE:
                break
        self._conclude(answers, dearer, fits=bool(answers))

    def _answer_of(self, count: int, outcome: Outcome) -> _Fastest:
        one = outcome.fitting[0]
        why = why_mesh(self._job, one.shared, one.judged.step_seconds, outcome.alone_seconds)
        return _Fastest(count, one.recipe, one.judged, one.shared, why)

    def _conclude(self, fastest: Sequence[_Fastest], dearer: Sequence[int], *, fits: bool) -> None:
        for one in fastest:
            about_mesh = doubts_about_mesh(self._job, one.shared, self.gpu)
            self.doubts.update(dict.fromkeys((*one.judged.doubts, *about_mesh)))
        why = "" if fastest else next(iter(self.refused.values()), "No recipe trains this job on it.")
        self.answer = CardsOfKind(
            gpu=self.gpu,
            fits=fits if fastest else None,
            headroom_bytes=self._headroom,
            build_on=self.build_on,
            answers=tuple(self._summary(one, fits=fits) for one in fastest),
            dearer=tuple(dearer),
            measured_rates=rates_for(self.gpu).measured,
            why=why,
        )

    def _summary(self, one: _Fastest, *, fits: bool) -> OnGpus:
        seconds = one.judged.step_seconds
        return OnGpus(
            gpus=one.gpus,
            recipe=str(one.recipe),
            needed_bytes=one.judged.needed_bytes,
            step_seconds=seconds,
            samples_per_second=self._job.batch_size / seconds if seconds else 0.0,
            fits=fits,
            why=one.why,
        )

    def _first_that_fits(self, base: Recipe) -> Asking[int | _Fastest]:
        """Return the index of the fewest GPUs that fit in the requested numbers.

        If none fits, return the nearest miss on the largest number.
        """
        smallest = yield from self._smallest(self._counts[0], base)
        if smallest is not None and self._fits(smallest):
            return 0
        low, high = 1, len(self._counts)
        if low < high:
            smallest = yield from self._smallest(self._counts[-1], base)
            high -= 1
        if smallest is None or not self._fits(smallest):
            return smallest if smallest is not None else 0
        while low < high:
            middle = (low + high) // 2
            smallest = yield from self._smallest(self._counts[middle], base)
            if smallest is not None and self._fits(smallest):
                high = middle
            else:
                low = middle + 1
        return high

    def _fits(self, one: _Fastest) -> bool:
        return self._evidence.does_fit(one.judged)

    def _smallest(self, count: int, base: Recipe) -> Asking[_Fastest | None]:
        """Return the recipe that takes the least memory on so many GPUs, with as few mesh axes as possible.

        If none fits, return the smallest of all. Return None if nothing can be simulated.
        """
        known: list[_Fastest] = []
        for axes in range(MOST_AXES + 1 if count > 1 else 1):
            smallest = yield from self._smallest_mesh(count, base, axes)
            known += [smallest] if smallest is not None else []
            if smallest is not None and self._fits(smallest):
                break
        return min(known, key=lambda one: one.judged.needed_bytes, default=None)

    def _smallest_mesh(self, count: int, base: Recipe, axes: int) -> Asking[_Fastest | None]:
        """Return the same with `axes` axes, the most recomputation, and the smallest pieces."""
        by_recomputing: dict[str, list[Shared]] = {}
        for shared in self._ways(count, base, axes):
            by_recomputing.setdefault(str(shared.recomputing), []).append(shared)
        for every in reversed(by_recomputing.values()):
            every_cut = [(shared, cuts(self._job, shared, self._fixed)) for shared in _leanest(every)]
            asked = [
                _WithSmallestPieces(shared, shared.cut(known[-1]), size_of(self._job, shared, known[-1]))
                for shared, known in every_cut
                if known
            ]
            if axes:
                asked = [one for one in asked if self._evidence.fits(one.shared, one.size) is not False]
            smallest = yield from self._smallest_of(count, asked)
            if smallest is not None:
                return smallest
        return None

    def _smallest_of(self, count: int, asked: Sequence[_WithSmallestPieces]) -> Asking[_Fastest | None]:
        if not asked:
            return None
        judged = yield [(count, one.recipe) for one in asked]
        known: list[_Fastest] = []
        for way, one in zip(asked, judged, strict=True):
            if one.why_not:
                self.refused[refusable(way.shared)] = one.why_not
            else:
                self._evidence.hear(way.shared, way.size, one)
                known.append(_Fastest(count, way.recipe, one, way.shared))
        return min(known, key=lambda one: one.judged.needed_bytes, default=None)

    def _ways(self, count: int, base: Recipe, axes: int) -> list[Shared]:
        """Return ways to share the work, without those whose recomputing cannot be simulated."""
        every = ways(self._job, base, count, self._fixed, axes)
        return [
            shared for shared in every if not {str(shared.recomputing), refusable(shared)} & {*self.refused}
        ]


class _WithSmallestPieces(NamedTuple):
    """A way to share the work, with the smallest micro-batches."""

    shared: Shared
    recipe: Recipe
    size: CutStep


def _leanest(every: Sequence[Shared]) -> list[Shared]:
    """Return the ways for which no other way is known to take no more memory."""
    return [
        shared
        for at, shared in enumerate(every)
        if not any(
            other.holds_no_more_than(shared) and not (index > at and shared.holds_no_more_than(other))
            for index, other in enumerate(every)
            if index != at
        )
    ]
