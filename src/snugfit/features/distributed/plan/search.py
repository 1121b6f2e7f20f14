"""Search for the fastest recipe on given numbers of GPUs of one model, or on the fewest GPUs of many models.

Numbers of GPUs are searched one after the other. The results of one bound the results of others
(`evidence.py`, `fastest.py`). Recipes are compared on models of few layers.

For one GPU model, the fastest recipes for each number of GPUs are then simulated with all layers, until one
fits. On the fastest answer's GPUs, the best few recipes are simulated and reported. For answers that
recompute layers, the fewest such layers are searched at the end (`part_recomputed.py`).

For many GPU models, bisection finds the fewest GPUs that fit, since each needs less memory if there are more.
The search continues with each larger number, as long as a step takes fewer GPU seconds. Layouts that cannot
take fewer than the best answer are skipped. GPU models that run the same kernels share each simulation.
Nothing is simulated in full: for a deep model and hundreds of micro-batches that takes minutes per answer.

**Choice.** Choice among the recipes that were simulated in full, which is not always the fastest.

Seconds are predicted well for a step that the GPU bounds, and not for one that the host bounds. The time of
FSDP2's Python, DDP's hooks and the user's own code depends on that host. Two recipes with predictions within
some per cent may then differ widely. An example is BERT-large on two H100s (64 x 512). `fsdp(reshard=none)`
was predicted at 112.7 ms and took 169, `ddp(bucket_views=true)` at 112.5 and took 118
(results/h100-2026-11-26/plan-2-bert.json).

1. of the recipes within `ALIKE` of the fewest seconds, those with the least relevant work of the host
2. among these the fastest, or the simplest that plans for one GPU count as equally fast
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from snugfit.errors import GpuError, SnugfitError, UsageError
from snugfit.features.distributed.plan.fastest import Outcome, Screened
from snugfit.features.distributed.plan.judge import InFull, Judge
from snugfit.features.distributed.plan.kind import GAIN, SearchesOfKinds, SearchOfKind, counts_of
from snugfit.features.distributed.plan.part_recomputed import FewestRecomputed, recomputes_layers
from snugfit.features.distributed.plan.plan import CardPlans, CardsOfKind, OnGpus, SeveralGpusPlan
from snugfit.features.distributed.plan.shared import Shared
from snugfit.job.gpu import Gpu, find_gpu
from snugfit.job.job import Job
from snugfit.planning.fleet.kinds import refuse_gpu
from snugfit.planning.fleet.search_gpus import gpus_of
from snugfit.planning.keep import Free, Keep, Kept
from snugfit.planning.plan import Exclusion
from snugfit.planning.search.plan_request import PlanRequest
from snugfit.planning.search.progress import Tell
from snugfit.planning.search.simpler import AS_FAST
from snugfit.prediction.profile import installed_versions
from snugfit.prediction.rates import rates_for
from snugfit.prediction.worker_pool import Question, WorkerPool
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity

FULL = 3
"""Number of recipes that are simulated with all layers, on as many GPUs as the fastest answer (chosen)."""

FEW = 4
"""Largest number of recomputing answers for which fewer recomputed layers are tried (chosen). If there are
more, only those on the fewest GPUs, the fastest and the cheapest are tried.
"""


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
    rates_for(gpu)  # raises an error for a GPU with unknown rates
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
        """Return the fastest recipe for `count` GPUs that fits in a simulation of all layers, or the one that
        exceeds the memory least.

        If a recipe does not fit with all layers, its bytes are stored, and the search continues.
        """
        missed: set[Recipe] = set()
        while fitting := self._outcomes[count].fitting:
            one = fitting[0]
            (answer,) = self._in_full([one])
            if answer is None:  # this recipe cannot be simulated, but the next one may
                fitting.pop(0)
                continue
            # If a second round has the same first recipe, further rounds would never end.
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
        """Return the plan with fewer recomputed layers in its fastest, fewest-GPU and cheapest recipes, or in
        all if few recompute. If that changes the fastest, the previous one is listed too.
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
            }  # answers that recompute less have no alternatives
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
        """Simulate these recipes with all layers on their numbers of GPUs, and return bytes and seconds; None
        after a failure.
        """
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
    """Return a recipe with the bytes and seconds from few layers. A recipe that does not fit by few layers
    may fit with all layers.
    """
    every = (*outcome.fitting, *([outcome.miss] if outcome.miss else []))
    return next(one for one in every if str(one.recipe) == answer.recipe)


def _from_both_ends(counts: Sequence[int]) -> list[int]:
    """Return the numbers from both ends inwards: the largest, the smallest, the second largest, and so on.

    A miss on more GPUs is also a miss on fewer, and a recipe that fits fewer also fits more.
    """
    more, fewer = sorted(counts, reverse=True), sorted(counts)
    return list(dict.fromkeys(one for pair in zip(more, fewer, strict=True) for one in pair))


PATIENCE = 2
"""The search ends after this many successive larger numbers of GPUs that are not cheaper (chosen)."""


def plan_cards(
    job: Job,
    kinds: Iterable[Gpu | str] | None = None,
    *,
    gpus: int | Sequence[int],
    headroom: int | str | None = None,
    fidelity: str | Fidelity = Fidelity.ROUNDS,
    keep: Keep = None,
    free: Free = (),
    workers: int | None = None,
    tell: Tell = lambda what: None,
) -> CardPlans:
    """Return, for each GPU model, the fewest GPUs that train the job, and larger numbers that take fewer GPU
    seconds.

    `kinds` are by default all of the table, and `gpus` the allowed numbers. The global batch stays unchanged.
    All other arguments are those of `plan_several_gpus`. A kind whose bytes or seconds
    are unknown gets no answer, with the reason. Raises `UsageError` for invalid arguments.
    """
    kinds = gpus_of(kinds)
    asked = PlanRequest.of(
        job, kinds, headroom=headroom, fidelity=fidelity, keep=keep, free=free, workers=workers, tell=tell,
        several_gpus=True, compares=True,
    )  # fmt: skip
    fixed = asked.fixed
    even, uneven = _shared_evenly(gpus, job, fixed)
    known, answers = _with_figures(kinds, fixed)
    refused: dict[str, str] = {}
    doubts: dict[str, None] = {}
    screened = 0
    if known:
        searches = SearchesOfKinds(replace(asked, gpus=known), even)
        with searches.open(Judge):
            for at, gpu in enumerate(known):
                tell(f"simulating on few layers, {screened} recipes done, for {gpu.name}")
                one = searches.of(at)
                answers[gpu.key] = _cards_of(one, gpu, even, asked.headroom_on(gpu), doubts)
                refused |= one.refused
                screened = searches.figures.screened
    return CardPlans(
        job=job,
        fidelity=asked.fidelity.value,
        gpus=tuple(even),
        uneven=tuple(uneven),
        answers=tuple(answers[gpu.key] for gpu in kinds),
        kept_slots=fixed.listing(),
        refused=tuple(Exclusion(what=what, why=why) for what, why in refused.items()),
        screened=screened,
        doubts=tuple(doubts),
        versions=installed_versions(),
    )


def _shared_evenly(counts: int | Sequence[int], job: Job, fixed: Kept) -> tuple[list[int], list[int]]:
    """Split the requested numbers of GPUs into those that divide the job's batch evenly, and the rest.

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
    """Split the GPU models into those with known memory and speed, and those without. Each of the latter has
    a result with the reason.
    """
    known, answers = [], {}
    for gpu in kinds:
        try:
            refuse_gpu(gpu, fixed)
            rates_for(gpu)
            known.append(gpu)
        except GpuError as unknown:
            answers[gpu.key] = CardsOfKind(gpu=gpu, fits=None, why=str(unknown))
    return known, answers


def _cards_of(
    search: SearchOfKind, gpu: Gpu, counts: Sequence[int], headroom_bytes: int, doubts: dict[str, None]
) -> CardsOfKind:
    """Return the plan for one GPU model, and add its warnings to `doubts`."""
    chosen: list[tuple[Screened, Outcome]] = []
    dearer: list[int] = []
    first, least = _first_that_fits(search, counts), math.inf
    for count in counts[first:]:
        limit, is_mesh = least / count, bool(chosen and chosen[-1][0].shared.mesh)
        outcome = search.fastest(count, limit, limit if is_mesh else GAIN * limit)
        if outcome.fitting:
            chosen.append((outcome.fitting[0], outcome))
            least, dearer = count * chosen[-1][0].judged.step_seconds, []
        elif chosen:
            dearer.append(count)
        if len(dearer) == PATIENCE:
            break
    fits = bool(chosen)
    if not chosen and (miss := search.nearest_miss(counts[-1])) is not None:
        chosen = [(miss, Outcome([], miss))]
    for one, _ in chosen:
        about_mesh = _doubts_about_mesh(search.job, one.shared, gpu)
        doubts.update(dict.fromkeys((*one.judged.doubts, *about_mesh)))
    answers = [search.answer(one, outcome, fits=fits) for one, outcome in chosen]
    return CardsOfKind(
        gpu=gpu,
        fits=fits if chosen else None,
        headroom_bytes=headroom_bytes,
        build_on=search.job.build_on,
        answers=tuple(answers if fits else (replace(one, why="") for one in answers)),
        dearer=tuple(dearer),
        measured_rates=rates_for(gpu).measured,
        why="" if chosen else next(iter(search.refused.values()), "No recipe trains this job on it."),
    )


def _first_that_fits(search: SearchOfKind, counts: Sequence[int]) -> int:
    """Return the index in `counts` of the fewest GPUs that fit; its length if none fits."""
    if search.fits(counts[0]):
        return 0
    if len(counts) == 1 or not search.fits(counts[-1]):
        return len(counts)
    return bisect.bisect_left(counts, True, 1, len(counts) - 1, key=search.fits)


def _doubts_about_mesh(job: Job, shared: Shared, gpu: Gpu) -> Iterator[str]:
    """Yield warnings that predictions with this layout's techniques for groups of GPUs were measured in few
    cases.
    """
    if shared.parts == 1:
        return
    for slot in roster.slots_of_several_gpus():
        technique = shared.recipe[slot]
        for warning in technique.warnings(job, gpu.compute_capability):
            yield f"{technique}: {warning}"


# ---- choice ------------------------------------------------------------------------------------------------


ALIKE = 1.03
"""Recipes within this factor of the shortest step count as equally fast (chosen), because predictions do not
distinguish them.
"""

HOST_MATTERS = 0.75
"""Share of a step's seconds in which the host works, below which this work is ignored (chosen).

A host with this share does not bound the step, even if it takes a third longer than predicted.
"""

HOST_ALIKE = 0.05
"""Difference of two recipes' host work that counts as equal, as a share of a step's seconds (chosen)."""


def best_first(answers: Sequence[OnGpus], limit: float = math.inf) -> list[OnGpus]:
    """Return the recipes with the plan's answer first, then the rest by predicted seconds. Also return the
    reason if the answer is not the fastest. The answer takes less than `limit` seconds a step, unless none
    does.
    """
    fastest, *slower = sorted(answers, key=lambda one: (one.step_seconds, _host_share(one), _length(one)))
    near = [one for one in slower if one.step_seconds < min(ALIKE * fastest.step_seconds, limit)]
    least = min(_host_share(one) for one in (fastest, *near))
    calm = [one for one in (fastest, *near) if _host_share(one) <= least + HOST_ALIKE]
    most = (1 + AS_FAST) * calm[0].step_seconds
    chosen = min((one for one in calm if one.step_seconds <= most), key=_length)
    if chosen is fastest:
        return [fastest, *slower]
    why = " ".join(filter(None, (chosen.why, _why_not(fastest, chosen, by_host=fastest not in calm))))
    return [replace(chosen, why=why), *(one for one in (fastest, *slower) if one is not chosen)]


def _host_share(one: OnGpus) -> float:
    return max(one.host_share or 0.0, HOST_MATTERS)


def _length(one: OnGpus) -> int:
    """Return the number of techniques that a recipe names, its length in a report."""
    return sum(not technique.plain for technique in Recipe.parse(one.recipe))


def _why_not(fastest: OnGpus, chosen: OnGpus, *, by_host: bool) -> str:
    faster = 1 - fastest.step_seconds / chosen.step_seconds
    if by_host:
        return (
            f"'{fastest.recipe}' is predicted to be {faster:.1%} faster, but there the host works in "
            f"{fastest.host_share or 0:.0%} of the step and here in {chosen.host_share or 0:.0%}. The "
            "host's seconds are the least certain."
        )
    return f"'{fastest.recipe}' is predicted to be {faster:.1%} faster, too little for the added techniques."
