"""The search: for each number of GPUs, the fastest way to share the work that fits.

For each way of sharing and recomputing, the fewest micro-batches with which it fits are found by bisection:
fewer take less time and more memory. What recomputes more is looked at only where what recomputes less does
not fit whole. Recipes are compared on models of few layers, many at a time; the fastest for each number of
GPUs are then simulated in full, until one fits. On the fastest answer's GPUs the best few are simulated, and
all are told.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from snugfit.errors import GpuError, SnugfitError, UsageError
from snugfit.job.gpu import Gpu, find_gpu
from snugfit.job.job import Job
from snugfit.planning.keep import Free, Keep, Kept, kept_of
from snugfit.planning.plan import Exclusion
from snugfit.planning.request import fidelity_of, refuse_bad_request
from snugfit.planning.several_gpus.bisection import Bisection, answer_to, choose_base, fitting
from snugfit.planning.several_gpus.candidates import cuts, ways
from snugfit.planning.several_gpus.judge import Judge, Judged
from snugfit.planning.several_gpus.plan import OnGpus, SeveralGpusPlan
from snugfit.prediction.headroom import headroom_of
from snugfit.prediction.profile import installed_versions
from snugfit.prediction.rates import rates_for
from snugfit.prediction.worker_pool import Question, WorkerPool, worker_pool
from snugfit.results.prediction import Prediction
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import MOST_GPUS
from snugfit.techniques.technique import Fidelity

FULL = 3
"""Recipes that are simulated in full on the fastest answer's GPUs (chosen)."""

Tell = Callable[[str], None]


def plan_several_gpus(
    job: Job,
    *,
    gpu: Gpu | str,
    gpus: int | Sequence[int],
    memory_bytes: int | None = None,
    headroom: int | str | None = None,
    fidelity: str | Fidelity = Fidelity.ROUNDS,
    keep: Keep = None,
    free: Free = (),
    workers: int | None = None,
    tell: Tell = lambda what: None,
) -> SeveralGpusPlan:
    """For each of these numbers of GPUs the fastest recipe that fits, the global batch kept.

    `memory_bytes` is what may be used of each GPU, by default all of it but its `headroom`; `keep` names
    techniques that are not searched; `workers` processes simulate side by side. Raises `UsageError` for what
    cannot be, and `SnugfitError` where nothing can be simulated.
    """
    refuse_bad_request(job, memory_bytes=memory_bytes, workers=workers)
    gpu = find_gpu(gpu)
    rates_for(gpu)  # which refuses a GPU of which no seconds are known
    counts = counts_of(gpus, job)
    fixed = replace(kept_of(job, keep, free, None), several_gpus=True)
    fixed.refuse(gpu.compute_capability)
    if memory_bytes is None and gpu.memory_bytes is None:
        raise GpuError(f"The memory of {gpu.name} is not known. Add memory_bytes (--memory).")
    memory = memory_bytes if memory_bytes is not None else gpu.memory_bytes or 0
    spare = headroom_of(headroom, gpu, memory_bytes)
    workers = min(2, os.cpu_count() or 1) if workers is None else workers
    with worker_pool(partial(Judge, job, gpu), workers=workers) as pool:
        search = _Search(job, gpu, memory - spare, fixed, fidelity_of(fidelity), pool, tell)
        answer = search.answer(counts)
    return replace(answer, memory_bytes=memory, headroom_bytes=spare)


def counts_of(gpus: int | Sequence[int], job: Job) -> list[int]:
    """The numbers of GPUs that can share the job's batch evenly, in order. Raises `UsageError` where none
    can."""
    asked = sorted({gpus} if isinstance(gpus, int) else set(gpus))
    wrong = [count for count in asked if type(count) is not int or not 1 <= count <= MOST_GPUS]
    if wrong or not asked:
        raise UsageError(f"gpus is {gpus!r}; it must be whole numbers from 1 to {MOST_GPUS:,}.")
    even = [count for count in asked if job.batch_size % count == 0]
    if not even:
        raise UsageError(
            f"A global batch of {job.batch_size} cannot be shared evenly by {asked[0]} GPUs"
            f"{' or any other number that was named' if len(asked) > 1 else ''}. Name a divisor of it."
        )
    return even


class _Search:
    """One search: what is asked, and what was found out so far."""

    def __init__(
        self, job: Job, gpu: Gpu, bound: int, fixed: Kept, fidelity: Fidelity, pool: WorkerPool, tell: Tell
    ) -> None:
        self._job, self._gpu, self._bound, self._fixed = job, gpu, bound, fixed
        self._fidelity, self._pool, self._tell = fidelity, pool, tell
        self._screened = 0
        self._refused: dict[str, str] = {}
        self._doubts: dict[str, None] = {}
        self._full: dict[tuple[int, Recipe], OnGpus | None] = {}

    def answer(self, counts: list[int]) -> SeveralGpusPlan:
        """The plan for these numbers of GPUs."""
        base = self._base(counts[-1])
        bisections = self._screen(counts, base)
        firsts = [(count, one.recipe) for count in counts for one in fitting(bisections[count])[:1]]
        self._in_full(firsts)
        answers = [self._best_of(count, bisections[count]) for count in counts]
        fastest = min((one for one in answers if one.fits), key=lambda one: one.step_seconds, default=None)
        alternatives: list[OnGpus] = []
        if fastest is not None:
            alternatives = self._alternatives(fastest, bisections[fastest.gpus])
        return SeveralGpusPlan(
            job=self._job,
            gpu=self._gpu,
            memory_bytes=self._bound,
            headroom_bytes=0,
            fidelity=self._fidelity.value,
            answers=tuple(answers),
            alternatives=tuple(alternatives),
            kept_slots=self._fixed.listing(),
            refused=tuple(Exclusion(what=what, why=why) for what, why in self._refused.items()),
            screened=self._screened,
            doubts=tuple(self._doubts),
            versions=installed_versions(),
        )

    def _judge(self, questions: Iterable[tuple[int, Recipe]]) -> list[Judged]:
        asked = [Question(at, "judge", question) for at, question in enumerate(questions)]
        self._screened += len(asked)
        answers = {answer.number: answer.value for answer in self._pool.answers_to(asked)}
        return [answers[at] for at in range(len(asked))]

    def _base(self, gpus: int) -> Recipe:
        """The recipe whose slots that are decided once take the least time, on so many GPUs."""
        self._tell("comparing precisions and optimizers")
        return answer_to(choose_base(self._job, gpus, self._fixed, self._fidelity), self._judge)

    def _screen(self, counts: Sequence[int], base: Recipe) -> dict[int, list[Bisection]]:
        """For each number of GPUs the ways to share, with the fewest pieces with which each fits."""
        bisections: dict[int, list[Bisection]] = defaultdict(list)
        for count in counts:
            for shared in ways(self._job, base, count, self._fixed):
                bisections[count].append(Bisection(shared, cuts(self._job, shared, self._fixed)))
        every = [one for ways_of_count in bisections.values() for one in ways_of_count]
        while asked := [
            (one, recipe)
            for one in every
            if one.is_wanted(bisections[one.shared.gpus]) and (recipe := one.next())
        ]:
            self._tell(f"simulating {len(asked)} recipes on few layers, {self._screened} done")
            judged = self._judge((one.shared.gpus, recipe) for one, recipe in asked)
            for (one, _), answer in zip(asked, judged, strict=True):
                one.hear(answer, self._bound)
                if answer.why_not:
                    self._refused[str(one.shared.recomputing)] = answer.why_not
                    for other in every:
                        if other.shared.recomputing == one.shared.recomputing:
                            other.why_not = answer.why_not
        return bisections

    def _best_of(self, count: int, ways_to_share: list[Bisection]) -> OnGpus:
        """The fastest that fits when it is simulated in full, or the nearest miss."""
        for one in fitting(ways_to_share):
            answer = self._in_full([(count, one.recipe)])[0]
            if answer is not None and answer.fits:
                return answer
        misses = [one for one in ways_to_share if one.smallest is not None]
        if not misses:
            reasons = [one.why_not for one in ways_to_share if one.why_not]
            raise SnugfitError(reasons[0] if reasons else f"No recipe trains this job on {count} GPUs.")
        nearest = min(misses, key=lambda one: one.smallest.needed_bytes if one.smallest else math.inf)
        miss = self._in_full([(count, nearest.smallest_recipe)])[0]
        if miss is None:
            raise SnugfitError(f"No recipe trains this job on {count} GPUs.")
        return miss

    def _alternatives(self, fastest: OnGpus, ways_to_share: list[Bisection]) -> list[OnGpus]:
        recipes = [one.recipe for one in fitting(ways_to_share) if str(one.recipe) != fastest.recipe]
        known = self._in_full([(fastest.gpus, one) for one in recipes[: FULL - 1]])
        return sorted(
            (one for one in known if one is not None and one.fits), key=lambda one: one.step_seconds
        )

    def _in_full(self, recipes: Sequence[tuple[int, Recipe]]) -> list[OnGpus | None]:
        """What these recipes take on so many GPUs each, simulated in full; None where that fails."""
        missing = [one for one in recipes if one not in self._full]
        if missing:
            self._tell(f"simulating {len(missing)} answers in full")
        asked = [Question(at, "in_full", (*one, self._bound)) for at, one in enumerate(missing)]
        for answer in self._pool.answers_to(asked):
            count, recipe = missing[answer.number]
            self._full[count, recipe] = self._summary(count, recipe, answer.value)
        return [self._full[one] for one in recipes]

    def _summary(self, count: int, recipe: Recipe, prediction: Prediction | SnugfitError) -> OnGpus | None:
        if isinstance(prediction, SnugfitError):
            self._refused[str(recipe)] = str(prediction)
            return None
        self._doubts.update(dict.fromkeys(prediction.doubts))
        timing = prediction.timing
        if timing is None:
            return None
        return OnGpus(
            gpus=count,
            recipe=str(recipe),
            needed_bytes=prediction.needed_bytes,
            step_seconds=timing.step_seconds,
            samples_per_second=timing.samples_per_second,
            scaling_efficiency=timing.scaling_efficiency,
            bound=timing.bound,
            fits=bool(prediction.fits),
        )
