"""Search for the fastest recipe that fits, for each number of GPUs.

Numbers of GPUs are searched one after the other. The results of one bound the results of others
(`evidence.py`, `fastest.py`). Recipes are compared on models of few layers. The fastest for each number of
GPUs are then simulated with all layers, until one fits. On the fastest answer's GPUs the best few are
simulated, and all are reported. For answers that recompute layers, the fewest layers are searched at the end
(`part_recomputed.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from snugfit.errors import GpuError, SnugfitError
from snugfit.features.distributed.plan.choosing import best_first
from snugfit.features.distributed.plan.fastest import Outcome, Screened
from snugfit.features.distributed.plan.judge import InFull, Judge
from snugfit.features.distributed.plan.kind import SearchesOfKinds, counts_of
from snugfit.features.distributed.plan.part_recomputed import FewestRecomputed, recomputes_layers
from snugfit.features.distributed.plan.plan import OnGpus, SeveralGpusPlan
from snugfit.job.gpu import Gpu, find_gpu
from snugfit.job.job import Job
from snugfit.planning.keep import Free, Keep
from snugfit.planning.plan import Exclusion
from snugfit.planning.search.plan_request import PlanRequest
from snugfit.planning.search.progress import Tell
from snugfit.prediction.profile import installed_versions
from snugfit.prediction.rates import rates_for
from snugfit.prediction.worker_pool import Question, WorkerPool
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity

FULL = 3
"""Number of recipes that are simulated in full on the GPUs of the fastest answer (chosen)."""

FEW = 4
"""Largest number of recomputing answers that are all tried with fewer layers (chosen). If there are more,
only those on the fewest GPUs, the fastest and the cheapest are tried."""


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
    gpu = find_gpu(gpu)
    asked = PlanRequest.of(
        job, [gpu], memory_bytes=memory_bytes, headroom=headroom, fidelity=fidelity, keep=keep, free=free,
        workers=workers, tell=tell, several_gpus=True,
    )  # fmt: skip
    rates_for(gpu)  # it refuses a GPU with unknown seconds
    counts = counts_of(gpus, job, asked.fixed)
    if asked.memory_on(gpu) is None:
        raise GpuError(f"The memory of {gpu.name} is not known. Add memory_bytes (--memory).")
    searches = SearchesOfKinds(asked, counts)
    with searches.open(Judge) as pool:
        return _Search(asked, gpu, searches, pool).answer(counts)


class _Search:
    """One search for several GPUs: its arguments and its results so far."""

    def __init__(self, asked: PlanRequest, gpu: Gpu, searches: SearchesOfKinds, pool: WorkerPool) -> None:
        self._asked, self._gpu, self._searches, self._pool = asked, gpu, searches, pool
        self._tell = asked.tell
        self._doubts: dict[str, None] = {}
        self._full: dict[tuple[int, Recipe], OnGpus | None] = {}

    def answer(self, counts: list[int]) -> SeveralGpusPlan:
        """Return the plan for these numbers of GPUs."""
        self._tell("comparing precisions and optimizers")
        self._kind = self._searches.of(0)
        self._outcomes = dict.fromkeys(counts, Outcome([], None))
        for count in _from_both_ends(counts):
            on_gpus = f"{count} GPU" + "s" * (count > 1)
            done = self._searches.figures.screened
            self._tell(f"simulating on few layers, {done} recipes done, for {on_gpus}")
            self._outcomes[count] = self._kind.fastest(count)
        firsts = [one.fitting[0] if one.fitting else one.miss for one in self._outcomes.values()]
        self._in_full([one for one in firsts if one is not None])
        answers = [self._best_of(count) for count in counts]
        fastest = min((one for one in answers if one.fits), key=lambda one: one.step_seconds, default=None)
        alternatives: list[OnGpus] = []
        if fastest is not None:
            first, *alternatives = self._all_in_full(fastest)
            answers = [first if one is fastest else one for one in answers]
        return self._recomputing_fewer(self._plan(answers, alternatives))

    def _plan(self, answers: Sequence[OnGpus], alternatives: Sequence[OnGpus]) -> SeveralGpusPlan:
        return SeveralGpusPlan(
            job=self._kind.job,
            gpu=self._gpu,
            memory_bytes=self._asked.memory_on(self._gpu) or 0,
            headroom_bytes=self._asked.headroom_on(self._gpu),
            fidelity=self._asked.fidelity.value,
            answers=tuple(answers),
            alternatives=tuple(alternatives),
            kept_slots=self._asked.fixed.listing(),
            refused=tuple(Exclusion(what=what, why=why) for what, why in self._kind.refused.items()),
            screened=self._searches.figures.screened,
            doubts=tuple(self._doubts),
            versions=installed_versions(),
        )

    def _best_of(self, count: int) -> OnGpus:
        """Return the fastest recipe that fits in a full simulation, or the nearest miss.

        After a miss, its bytes are stored, and the search continues.
        """
        missed: set[Recipe] = set()
        while fitting := self._outcomes[count].fitting:
            one = fitting[0]
            (answer,) = self._in_full([one])
            if answer is None:  # it cannot be simulated: the next one may
                fitting.pop(0)
                continue
            # After a second round with the same first recipe, further rounds would never end.
            if answer.fits or one.recipe in missed:
                return replace(answer, why=self._why_mesh(one, answer))
            missed.add(one.recipe)
            judged = one.judged._replace(needed_bytes=answer.needed_bytes)
            self._kind.evidence.hear(one.shared, one.size, judged)
            self._outcomes[count] = self._kind.fastest(count)
        if (nearest := self._outcomes[count].miss) is not None:
            (miss,) = self._in_full([nearest])
            if miss is not None:
                return replace(miss, why="")
        why = f"No recipe trains this job on {count} GPUs."
        raise SnugfitError(next(iter(self._kind.refused.values()), why))

    def _all_in_full(self, fastest: OnGpus) -> list[OnGpus]:
        """Return the fastest answer and other fitting recipes, simulated with all layers.

        If few layers show small differences, another recipe may prove faster, or equally fast with less
        work of the host.
        """
        fitting = self._outcomes[fastest.gpus].fitting
        rest = self._in_full([one for one in fitting if str(one.recipe) != fastest.recipe][: FULL - 1])
        on_others = [one for one in self._full.values() if one and one.fits and one.gpus != fastest.gpus]
        limit = min((one.step_seconds for one in on_others), default=math.inf)
        return best_first([fastest, *(one for one in rest if one is not None and one.fits)], limit)

    def _recomputing_fewer(self, plan: SeveralGpusPlan) -> SeveralGpusPlan:
        """Return the plan whose named answers recompute no more than necessary; all answers, if few of them
        recompute.

        If that changes the fastest, its previous answer is listed too.
        """
        before = after = {one.gpus: one for one in plan.answers}
        found_as = {one.gpus: _way_of(one, self._outcomes[one.gpus]) for one in plan.fitting}
        left = {gpus for gpus, one in found_as.items() if recomputes_layers(one)}
        are_few = len(left) <= FEW
        kind = self._kind
        fewer = FewestRecomputed(kind.job, kind.fixed, kind.bound, kind.judge, self._in_full)
        new = plan
        while True:
            named = new.fitting if are_few else (new.fewest, new.fastest, new.cheapest)
            asked = {one.gpus: one for one in named if one is not None and one.gpus in left}
            if not asked:
                break
            left -= {*asked}
            alone = {
                gpus: replace(one, why=self._why_mesh(found_as[gpus], one)) for gpus, one in asked.items()
            }  # answers that recompute less are compared with no rival
            better = fewer.run([(one, found_as[gpus]) for gpus, one in alone.items()])
            after = after | {gpus: one for gpus, one in better.items() if one != alone[gpus]}
            new = self._plan(tuple(after.values()), plan.alternatives)
        fastest, alternatives = new.fastest, plan.alternatives
        if fastest is not None and fastest != before[fastest.gpus]:
            is_same = plan.fastest is not None and plan.fastest.gpus == fastest.gpus
            alternatives = (before[fastest.gpus], *(alternatives if is_same else ()))
        return replace(new, alternatives=alternatives)

    def _why_mesh(self, way: Screened, answer: OnGpus) -> str:
        return self._kind.answer(way, self._outcomes[answer.gpus], step_seconds=answer.step_seconds).why

    def _in_full(self, recipes: Sequence[Screened]) -> list[OnGpus | None]:
        """Return the figures of these recipes on their numbers of GPUs, simulated with all layers; None after
        a failure."""
        keys = [(one.size.gpus, one.recipe) for one in recipes]
        missing = [one for key, one in zip(keys, recipes, strict=True) if key not in self._full]
        if missing:
            self._tell(f"simulating {len(missing)} answers with all layers")
        asked = [Question(at, "in_full", (one.size.gpus, one.recipe)) for at, one in enumerate(missing)]
        for answer in self._pool.answers_to(asked):
            one = missing[answer.number]
            self._full[one.size.gpus, one.recipe] = self._summary(one, answer.value)
        return [self._full[key] for key in keys]

    def _summary(self, one: Screened, full: InFull | SnugfitError) -> OnGpus | None:
        if isinstance(full, SnugfitError):
            self._kind.refused[str(one.recipe)] = str(full)
            return None
        self._doubts.update(dict.fromkeys(full.doubts))
        seconds, efficiency = one.judged.step_seconds, None
        if full.timing is not None:
            seconds, efficiency = full.timing.step_seconds, full.timing.scaling_efficiency
        elif one.size.gpus > 1 and seconds:
            efficiency = 1 - one.judged.exposed_seconds / seconds
        return self._kind.answer(
            one,
            self._outcomes[one.size.gpus],
            needed_bytes=full.needed_bytes,
            step_seconds=seconds,
            scaling_efficiency=efficiency,
            bound=full.bound,
            host_share=full.host_share,
            fits=full.needed_bytes <= self._kind.bound,
        )


def _way_of(answer: OnGpus, outcome: Outcome) -> Screened:
    """Return the recipe of an answer as found on few layers. A miss there may fit with all."""
    every = (*outcome.fitting, *([outcome.miss] if outcome.miss else []))
    return next(one for one in every if str(one.recipe) == answer.recipe)


def _from_both_ends(counts: Sequence[int]) -> list[int]:
    """Return the numbers from both ends inwards: the largest, the smallest, the second largest, and so on.

    A miss on more GPUs is also a miss on fewer, and a recipe that fits fewer also fits more.
    """
    more, fewer = sorted(counts, reverse=True), sorted(counts)
    return list(dict.fromkeys(one for pair in zip(more, fewer, strict=True) for one in pair))
