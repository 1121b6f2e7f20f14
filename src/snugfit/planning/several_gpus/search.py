"""The search for the fastest way to share the work that fits, for each number of GPUs.

Numbers of GPUs are searched one after the other. The results of one bound the results of others
(`evidence.py`, `fastest.py`). Recipes are compared on models of few layers. The fastest for each number of
GPUs are then simulated with all layers, until one fits. On the fastest answer's GPUs the best few are
simulated, and all are reported. For answers that recompute layers, the fewest layers are searched at the
end (`part_recomputed.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from snugfit.errors import GpuError, SnugfitError
from snugfit.job.gpu import Gpu, find_gpu
from snugfit.job.job import Job
from snugfit.planning.keep import Free, Keep, Kept, kept_of
from snugfit.planning.plan import Exclusion
from snugfit.planning.request import fidelity_of, refuse_bad_request
from snugfit.planning.several_gpus.asking import Asked, answer_to, choose_base, counts_of
from snugfit.planning.several_gpus.building import built_where_it_fits
from snugfit.planning.several_gpus.choosing import best_first
from snugfit.planning.several_gpus.evidence import Evidence
from snugfit.planning.several_gpus.fastest import Outcome, Screened
from snugfit.planning.several_gpus.judge import InFull, Judge, Judged, modules_of
from snugfit.planning.several_gpus.meshes import FastestMesh
from snugfit.planning.several_gpus.part_recomputed import FewestRecomputed, recomputes_layers
from snugfit.planning.several_gpus.plan import OnGpus, SeveralGpusPlan
from snugfit.planning.several_gpus.reasons import why_mesh
from snugfit.prediction.headroom import headroom_of
from snugfit.prediction.profile import installed_versions
from snugfit.prediction.rates import rates_for
from snugfit.prediction.worker_pool import Question, WorkerPool, worker_pool
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity

FULL = 3
"""Number of recipes that are simulated in full on the fastest answer's GPUs (chosen)."""

FEW = 4
"""Greatest number of recomputing answers that are all tried with fewer layers (chosen).

If there are more, only those on the fewest GPUs, the fastest and the cheapest are tried.
"""

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
    """Return the fastest recipe that fits for each of these numbers of GPUs, with the same global batch.

    `memory_bytes` are the usable bytes of each GPU, by default all but its `headroom`. `keep` names
    techniques that are not searched. `workers` processes simulate concurrently. A model whose weights
    exceed a GPU is planned with construction on the host, as shown in the answer's `job`. Raises
    `UsageError` for invalid arguments, and `SnugfitError` if nothing can be simulated.
    """
    refuse_bad_request(job, memory_bytes=memory_bytes, workers=workers)
    gpu = find_gpu(gpu)
    rates_for(gpu)  # it refuses a GPU with unknown seconds
    fixed = replace(kept_of(job, keep, free, None), several_gpus=True)
    fixed.refuse(gpu.compute_capability)
    counts = counts_of(gpus, job, fixed)
    if memory_bytes is None and gpu.memory_bytes is None:
        raise GpuError(f"The memory of {gpu.name} is not known. Add memory_bytes (--memory).")
    memory = memory_bytes if memory_bytes is not None else gpu.memory_bytes or 0
    spare = headroom_of(headroom, gpu, memory_bytes)
    workers = min(2, os.cpu_count() or 1) if workers is None else workers
    job = built_where_it_fits(job, memory - spare)
    make = partial(Judge, job, gpu)
    with worker_pool(make, workers=workers, preload=modules_of(job)) as pool:
        search = _Search(job, gpu, memory - spare, fixed, fidelity_of(fidelity), pool, tell)
        answer = search.answer(counts)
    return replace(answer, memory_bytes=memory, headroom_bytes=spare)


class _Search:
    """One search: its arguments and its results so far."""

    def __init__(
        self, job: Job, gpu: Gpu, bound: int, fixed: Kept, fidelity: Fidelity, pool: WorkerPool, tell: Tell
    ) -> None:
        self._job, self._gpu, self._bound, self._fixed = job, gpu, bound, fixed
        self._fidelity, self._pool, self._tell = fidelity, pool, tell
        self._screened = 0
        self._evidence = Evidence(bound)
        self._known: dict[tuple[int, Recipe], Judged] = {}
        self._refused: dict[str, str] = {}
        self._doubts: dict[str, None] = {}
        self._full: dict[tuple[int, Recipe], OnGpus | None] = {}

    def answer(self, counts: list[int]) -> SeveralGpusPlan:
        """Return the plan for these numbers of GPUs."""
        base = self._base(counts)
        outcomes = self._screen(counts, base)
        firsts = [(count, one.fitting[0] if one.fitting else one.miss) for count, one in outcomes.items()]
        self._in_full([(count, one) for count, one in firsts if one is not None])
        answers = [self._best_of(count, base, outcomes) for count in counts]
        fastest = min((one for one in answers if one.fits), key=lambda one: one.step_seconds, default=None)
        alternatives: list[OnGpus] = []
        if fastest is not None:
            first, *alternatives = self._all_in_full(fastest, outcomes[fastest.gpus])
            answers = [first if one is fastest else one for one in answers]
        return self._recomputing_fewer(self._plan(answers, alternatives), outcomes)

    def _plan(self, answers: Sequence[OnGpus], alternatives: Sequence[OnGpus]) -> SeveralGpusPlan:
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

    def _judge(self, questions: Asked) -> list[Judged]:
        asked = [
            Question(at, "judge", question)
            for at, question in enumerate(questions)
            if question not in self._known
        ]
        self._screened += len(asked)
        for answer in self._pool.answers_to(asked):
            self._known[questions[answer.number]] = answer.value
        return [self._known[question] for question in questions]

    def _base(self, counts: Sequence[int]) -> Recipe:
        """Return the recipe whose techniques in `DECIDED_ONCE` take the least time."""
        self._tell("comparing precisions and optimizers")
        return answer_to(choose_base(self._job, counts, self._fixed, self._fidelity), self._judge)

    def _screen(self, counts: Sequence[int], base: Recipe) -> dict[int, Outcome]:
        """Return the recipes that fit, or nearly fit, each number of GPUs."""
        outcomes: dict[int, Outcome] = {}
        for count in _from_both_ends(counts):
            on_gpus = f"{count} GPU" + "s" * (count > 1)
            self._tell(f"simulating on few layers, {self._screened} recipes done, for {on_gpus}")
            outcomes[count] = self._fastest(count, base)
        return {count: outcomes[count] for count in counts}

    def _fastest(self, count: int, base: Recipe) -> Outcome:
        search = FastestMesh(self._job, base, self._fixed, self._evidence, self._refused)
        return answer_to(search.run(count), self._judge)

    def _best_of(self, count: int, base: Recipe, outcomes: dict[int, Outcome]) -> OnGpus:
        """Return the fastest recipe that fits in a full simulation, or the nearest miss.

        After a miss, its bytes are stored, and the search continues.
        """
        answers: dict[Recipe, OnGpus] = {}
        while outcomes[count].fitting:
            one = outcomes[count].fitting[0]
            answer = self._in_full([(count, one)])[0]
            if answer is None:  # it cannot be simulated: the next one may
                outcomes[count].fitting.pop(0)
                continue
            if answer.fits or one.recipe in answers:
                return replace(answer, why=self._why_mesh(one, answer, outcomes[count]))
            answers[one.recipe] = answer
            self._evidence.hear(one.shared, one.size, one.judged._replace(needed_bytes=answer.needed_bytes))
            outcomes[count] = self._fastest(count, base)
        if (nearest := outcomes[count].miss) is not None:
            miss = self._in_full([(count, nearest)])[0]
            if miss is not None:
                return miss
        raise SnugfitError(next(iter(self._refused.values()), f"No recipe trains this job on {count} GPUs."))

    def _all_in_full(self, fastest: OnGpus, outcome: Outcome) -> list[OnGpus]:
        """Return the fastest answer and other fitting recipes, simulated with all layers.

        If few layers show small differences, another recipe may prove faster, or equally fast with less
        work of the host.
        """
        rest = [one for one in outcome.fitting if str(one.recipe) != fastest.recipe][: FULL - 1]
        known = self._in_full([(fastest.gpus, one) for one in rest])
        fitting = [
            replace(one, why=self._why_mesh(way, one, outcome))
            for way, one in zip(rest, known, strict=True)
            if one is not None and one.fits
        ]
        on_others = [one for one in self._full.values() if one and one.fits and one.gpus != fastest.gpus]
        limit = min((one.step_seconds for one in on_others), default=math.inf)
        return best_first([fastest, *fitting], limit)

    def _why_mesh(self, way: Screened, answer: OnGpus, outcome: Outcome) -> str:
        return why_mesh(self._job, way.shared, answer.step_seconds, outcome.alone_seconds)

    def _recomputing_fewer(self, plan: SeveralGpusPlan, outcomes: dict[int, Outcome]) -> SeveralGpusPlan:
        """Return the plan whose named answers recompute no more than necessary; all answers, if few of them
        recompute.

        If that changes the fastest, its previous answer is listed too.
        """
        before = after = {one.gpus: one for one in plan.answers}
        found_as = {one.gpus: _way_of(one, outcomes[one.gpus]) for one in plan.fitting}
        left = {gpus for gpus, one in found_as.items() if recomputes_layers(one)}
        are_few = len(left) <= FEW
        search = FewestRecomputed(self._job, self._fixed, self._bound, self._judge, self._in_full)
        new = plan
        while True:
            named = new.fitting if are_few else (new.fewest, new.fastest, new.cheapest)
            asked = {one.gpus: one for one in named if one is not None and one.gpus in left}
            if not asked:
                break
            left -= {*asked}
            alone = {
                gpus: replace(one, why=self._why_mesh(found_as[gpus], one, outcomes[gpus]))
                for gpus, one in asked.items()
            }  # answers that recompute less are compared with no rival
            fewer = search.run([(one, found_as[gpus]) for gpus, one in alone.items()])
            after = after | {gpus: one for gpus, one in fewer.items() if one != alone[gpus]}
            new = self._plan(tuple(after.values()), plan.alternatives)
        fastest, alternatives = new.fastest, plan.alternatives
        if fastest is not None and fastest != before[fastest.gpus]:
            is_same = plan.fastest is not None and plan.fastest.gpus == fastest.gpus
            alternatives = (before[fastest.gpus], *(alternatives if is_same else ()))
        return replace(new, alternatives=alternatives)

    def _in_full(self, recipes: Sequence[tuple[int, Screened]]) -> list[OnGpus | None]:
        """Return the figures of these recipes on their numbers of GPUs, simulated with all layers; None after
        a failure."""
        missing = [(count, one) for count, one in recipes if (count, one.recipe) not in self._full]
        if missing:
            self._tell(f"simulating {len(missing)} answers with all layers")
        asked = [Question(at, "in_full", (count, one.recipe)) for at, (count, one) in enumerate(missing)]
        for answer in self._pool.answers_to(asked):
            count, one = missing[answer.number]
            self._full[count, one.recipe] = self._summary(count, one, answer.value)
        return [self._full[count, one.recipe] for count, one in recipes]

    def _summary(self, count: int, screened: Screened, full: InFull | SnugfitError) -> OnGpus | None:
        recipe, judged = screened.recipe, screened.judged
        if isinstance(full, SnugfitError):
            self._refused[str(recipe)] = str(full)
            return None
        self._doubts.update(dict.fromkeys(full.doubts))
        seconds, efficiency = judged.step_seconds, None
        if full.timing is not None:
            seconds, efficiency = full.timing.step_seconds, full.timing.scaling_efficiency
        elif count > 1 and seconds:
            efficiency = 1 - judged.exposed_seconds / seconds
        return OnGpus(
            gpus=count,
            recipe=str(recipe),
            needed_bytes=full.needed_bytes,
            step_seconds=seconds,
            samples_per_second=self._job.batch_size / seconds if seconds else 0.0,
            scaling_efficiency=efficiency,
            bound=full.bound,
            host_share=full.host_share,
            fits=full.needed_bytes <= self._bound,
        )


def _way_of(answer: OnGpus, outcome: Outcome) -> Screened:
    """Return an answer as found on few layers. A miss there may fit with all."""
    every = (*outcome.fitting, *([outcome.miss] if outcome.miss else []))
    return next(one for one in every if str(one.recipe) == answer.recipe)


def _from_both_ends(counts: Sequence[int]) -> list[int]:
    """Return the largest, the smallest, the second largest number, and so on.

    A miss on more GPUs is also a miss on fewer, and a recipe that fits fewer also fits more.
    """
    more, fewer = sorted(counts, reverse=True), sorted(counts)
    return list(dict.fromkeys(one for pair in zip(more, fewer, strict=True) for one in pair))
