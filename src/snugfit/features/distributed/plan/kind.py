"""Search for the fastest recipes on GPUs of one model: the basic recipe, the numbers of GPUs, and groups of
GPUs.

Data parallelism alone comes first. In a mesh, groups of GPUs share matrices (tensor parallelism), sequences
or layers. Meshes are tried if they may be clearly faster.

They are tried if nothing else fits, or if this number of GPUs cannot share the batch evenly. They are also
tried if they may take less than `GAIN` of the seconds of data parallelism alone. This requires a step that
recomputes layers, or spends much time on exchanges. Its arithmetic alone, shared by all GPUs, must take less.
Two such axes are combined if nothing with one of them fits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from snugfit.errors import UsageError
from snugfit.features.distributed.plan.building import built_where_it_fits
from snugfit.features.distributed.plan.candidates import (
    DECIDED_ONCE,
    MOST_AXES,
    cuts,
    fillings,
    is_valid,
    ways,
)
from snugfit.features.distributed.plan.evidence import Evidence
from snugfit.features.distributed.plan.fastest import FastestOnGpus, Judging, Outcome, Screened, smaller_miss
from snugfit.features.distributed.plan.judge import Judged
from snugfit.features.distributed.plan.plan import OnGpus
from snugfit.features.distributed.plan.shared import Shared
from snugfit.job.job import Job
from snugfit.planning.keep import Kept
from snugfit.planning.search.plan_request import PlanRequest
from snugfit.prediction.device import policy_for
from snugfit.prediction.exchanges import modules_of
from snugfit.prediction.profile import Software
from snugfit.prediction.worker_pool import Question, WorkerPool, worker_pool
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import MOST_GPUS
from snugfit.techniques.technique import Fidelity, Slot

GAIN = 0.75
"""Greatest ratio of a mesh's step time to that of data parallelism alone at which the mesh is preferred
(chosen). In five mesh steps on two H100s, used for no fit, one took 41 % longer than predicted. The rest took
3 % less to 14 % longer.
"""


def counts_of(gpus: int | Sequence[int], job: Job, fixed: Kept) -> list[int]:
    """Return the numbers of GPUs that can divide the job's batch evenly, in order.

    Each GPU, or each group of them, takes a part. Raises `UsageError` if no number can.
    """
    asked = sorted({gpus} if isinstance(gpus, int) else set(gpus))
    wrong = [count for count in asked if type(count) is not int or not 1 <= count <= MOST_GPUS]
    if wrong or not asked:
        given = ", ".join(map(repr, wrong)) or "empty"
        raise UsageError(f"gpus is {given}; it must be whole numbers from 1 to {MOST_GPUS:,}.")
    even = [count for count in asked if job.batch_size % count == 0 or any(_all_ways(job, count, fixed))]
    if not even:
        raise UsageError(
            f"A global batch of {job.batch_size} cannot be shared evenly by {asked[0]} GPUs"
            f"{' or any other number that was named' if len(asked) > 1 else ''}. Name a divisor of it."
        )
    return even


def _all_ways(job: Job, gpus: int, fixed: Kept) -> Iterator[Shared]:
    """Yield all parallelism layouts of the job over this number of GPUs, those with the fewest mesh axes
    first.
    """
    base = Recipe(tuple(techniques[0] for techniques in fixed.slots.values()))
    for axes in _axes(gpus):
        yield from ways(job, base, gpus, fixed, axes)


def _axes(gpus: int) -> range:
    """Return the possible numbers of mesh axes, besides data parallelism, for this number of GPUs."""
    return range(MOST_AXES + 1 if gpus > 1 else 1)


class SharedFigures:
    """Cache of predicted bytes and seconds, shared by GPU models that run the same kernels."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._known: dict[tuple[Any, ...], list[Judged]] = {}

    @property
    def screened(self) -> int:
        """Number of recipes that were simulated with few layers so far."""
        return len(self._known)

    def judge_for(self, kind: int, kinds: Sequence[int], build_on: str | None = None) -> Judging:
        """Return a function that predicts bytes and seconds of recipes for one GPU model. `kinds` are indices
        of the GPU models for which the model is built on the same device.
        """
        of_kinds = (tuple(kinds), build_on)

        def judge(asked: Sequence[tuple[int, Recipe]]) -> list[Judged]:
            missing = [one for one in dict.fromkeys(asked) if (*one, *of_kinds) not in self._known]
            questions = [
                Question(number, "judge_kinds", (*one, *of_kinds)) for number, one in enumerate(missing)
            ]
            for answer in self._pool.answers_to(questions):
                self._known[*missing[answer.number], *of_kinds] = answer.value
            own = kinds.index(kind)
            return [self._known[*one, *of_kinds][own] for one in asked]

        return judge


class SearchesOfKinds:
    """The searches on all requested GPU models, with one pool of worker processes. GPU models share
    predictions if they run the same kernels and build the model on the same device.
    """

    def __init__(self, asked: PlanRequest, counts: Sequence[int]) -> None:
        self._asked, self._counts = asked, counts
        self._bounds = [(asked.memory_on(gpu) or 0) - asked.headroom_on(gpu) for gpu in asked.gpus]
        self.jobs = [built_where_it_fits(asked.job, bound) for bound in self._bounds]
        groups: dict[Hashable, list[int]] = defaultdict(list)
        self._alike: list[list[int]] = []
        for index, (gpu, job) in enumerate(zip(asked.gpus, self.jobs, strict=True)):
            self._alike.append(groups[policy_for(gpu, Software()).decisions, job.build_on])
            self._alike[-1].append(index)

    @contextmanager
    def open(self, judge: Callable[..., Any]) -> Iterator[WorkerPool]:
        """Start the pool of worker processes, each with the predictor `judge` of the first job and all GPU
        models; yield the searches.
        """
        job = self.jobs[0]
        make = partial(judge, job, *self._asked.gpus)
        with worker_pool(make, workers=self._asked.workers, preload=modules_of(job)) as pool:
            self.figures = SharedFigures(pool)
            yield pool

    def of(self, kind: int) -> SearchOfKind:
        """Return the search on the GPU model with this index. Raises `UsageError` if no technique can divide
        the job.
        """
        job, asked = self.jobs[kind], self._asked
        judge = self.figures.judge_for(kind, self._alike[kind], job.build_on)
        return SearchOfKind(job, self._bounds[kind], asked.fixed, self._counts, asked.fidelity, judge)


class SearchOfKind:
    """The search for one job on GPUs of one model, each with `bound` usable bytes. Recipes that cannot be
    simulated are added to `refused`, with the reasons. Raises `UsageError` if no technique distributes the
    job over the largest number in `counts`.
    """

    def __init__(
        self, job: Job, bound: int, fixed: Kept, counts: Sequence[int], fidelity: Fidelity, judge: Judging
    ) -> None:
        self.job, self.fixed, self.judge = job, fixed, judge
        self.bound, self.evidence = bound, Evidence(bound)
        self.refused: dict[str, str] = {}
        self._base = self._choose_base(counts, fidelity)

    def _choose_base(self, counts: Sequence[int], fidelity: Fidelity) -> Recipe:
        """Return the recipe with the fastest precision, matrix products and optimizer, which all other
        candidates share.

        They are compared on the largest number of GPUs that gives each a part of the batch. A single GPU may
        support techniques that several GPUs do not.
        """
        job, fixed = self.job, self.fixed
        gpus = max([count for count in counts if job.batch_size % count == 0] or counts)
        shared = next(_all_ways(job, gpus, fixed), None)
        if shared is None:
            raise UsageError(
                f"No technique can divide this job over {gpus} GPUs. Try another number of GPUs, or a "
                "larger batch."
            )
        base = shared.cut(cuts(job, shared, fixed)[-1]) if shared.stages > 1 else shared.recipe
        for slot in DECIDED_ONCE:
            choices = [base.with_(one) for one in fillings(job, slot, fixed, fidelity)]
            valid = [one for one in choices if is_valid(job, one, gpus)]
            # A single valid technique needs no comparison.
            judged = self.judge([(gpus, one) for one in valid]) if len(valid) > 1 else []
            timed = [(one.step_seconds, at) for at, one in enumerate(judged) if not one.why_not]
            if valid and (timed or len(valid) == 1):
                base = valid[min(timed)[1] if timed else 0]
        # The number of micro-batches and the layout are searched later, for each number of GPUs.
        for slot in (Slot.BATCHING, *roster.slots_of_several_gpus()):
            base = base.with_(roster.plain(slot)) if slot not in fixed.slots else base
        return base

    def fits(self, gpus: int) -> bool:
        """Return True if any recipe fits this number of GPUs, by the recipes with the least memory."""
        return any(self._among(gpus, axes).does_any_fit() for axes in _axes(gpus))

    def nearest_miss(self, gpus: int) -> Screened | None:
        """Return the simulated recipe with the fewest bytes on this number of GPUs; None if nothing can be
        simulated.
        """
        return smaller_miss(*(self._among(gpus, axes).nearest_miss() for axes in _axes(gpus)))

    def fastest(self, gpus: int, limit: float = math.inf, mesh_limit: float = math.inf) -> Outcome:
        """Return the recipes that fit this number of GPUs in less than `limit` seconds a step, or
        `mesh_limit` for a mesh. Without a limit and without a recipe that fits, return the one that exceeds
        the memory least.
        """
        outcome = self._among(gpus, 0).run(limit)
        fitting, miss, fits = outcome.fitting, outcome.miss, outcome.does_any_fit
        if fitting:
            mesh_limit = min(mesh_limit, GAIN * fitting[0].judged.step_seconds)
        mesh_limit = min(limit, mesh_limit)
        alone = fitting[0].judged.step_seconds if fitting else limit if fits else None
        for axes in _axes(gpus)[1:]:
            meshes = self._among(gpus, axes, leanest_first=mesh_limit == math.inf).run(mesh_limit)
            fits = fits or meshes.does_any_fit
            miss = smaller_miss(miss, meshes.miss)
            fitting = [*meshes.fitting, *fitting]
            # Meshes with more axes are tried only while nothing fits.
            if fits:
                break
        return Outcome(fitting, None if fitting else miss, fits, alone)

    def _among(self, gpus: int, axes: int, *, leanest_first: bool = True) -> FastestOnGpus:
        every = ways(self.job, self._base, gpus, self.fixed, axes)
        return FastestOnGpus(
            self.job, gpus, every, self.fixed, self.evidence, self.refused, self.judge,
            leanest_first=leanest_first,
        )  # fmt: skip

    def answer(self, one: Screened, outcome: Outcome, **known: Any) -> OnGpus:
        """Return a recipe as a result of the plan (`OnGpus`). Its bytes and seconds are extrapolated from
        models of few layers, or given as `known`.
        """
        figures = {"step_seconds": one.judged.step_seconds, "needed_bytes": one.judged.needed_bytes, **known}
        seconds = figures["step_seconds"]
        return OnGpus(
            gpus=one.size.gpus,
            recipe=str(one.recipe),
            samples_per_second=self.job.batch_size / seconds if seconds else 0.0,
            why=why_mesh(self.job, one.shared, seconds, outcome.alone_seconds),
            **figures,
        )


def why_mesh(job: Job, shared: Shared, step_seconds: float, alone_seconds: float | None) -> str:
    """Return a sentence on the plan's groups of GPUs and the reason for them; empty without groups.
    `alone_seconds` is the lower bound of a step with data parallelism alone, None if data parallelism does
    not fit.
    """
    if shared.parts == 1:
        return ""
    what = " and ".join(shared.groups())
    if job.batch_size % shared.gpus:
        why = f"a batch of {job.batch_size:,} cannot be shared evenly by {shared.gpus:,} GPUs"
    elif alone_seconds is None:
        why = "nothing fits with data parallelism alone"
    else:
        why = f"data parallelism alone takes at least {alone_seconds / step_seconds:.1f} times as long"
    return f"{what}, because {why}."
