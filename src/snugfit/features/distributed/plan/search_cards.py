"""Search for the number of cards: the fewest of each kind of GPU that fit, and cheaper larger numbers.

Each GPU needs less memory if there are more of them. Bisection therefore finds the fewest that fit. For this
number the fastest recipe is searched as in `snugfit plan --gpus`. The search continues with each larger
number, as long as a step takes fewer GPU seconds. Two rules keep it short:

- Simulated recipes bound others (`evidence.py`). A way to share the work that cannot take
  fewer GPU seconds than the best answer is skipped.
- Kinds that run the same kernels share each rehearsal.

Bytes and seconds are those of few layers and few micro-batches (`judge.py`). Nothing is
simulated in full: for a deep model and hundreds of micro-batches that takes minutes per answer.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from snugfit.errors import GpuError, UsageError
from snugfit.features.distributed.plan.building import built_where_it_fits
from snugfit.features.distributed.plan.cards import CardPlans, CardsOfKind
from snugfit.features.distributed.plan.fastest import Outcome, Screened
from snugfit.features.distributed.plan.judge import Judge
from snugfit.features.distributed.plan.kind import GAIN, SearchOfKind, SharedFigures, counts_of
from snugfit.features.distributed.plan.search import Tell
from snugfit.features.distributed.plan.shared import Shared
from snugfit.job.gpu import Gpu, all_gpus, find_gpu
from snugfit.job.job import Job
from snugfit.planning.fleet.kinds import refuse_gpu
from snugfit.planning.keep import Free, Keep, Kept, kept_of
from snugfit.planning.plan import Exclusion
from snugfit.planning.request import fidelity_of, refuse_bad_request, workers_of
from snugfit.prediction.device import policy_for
from snugfit.prediction.headroom import headroom_of
from snugfit.prediction.profile import Software, installed_versions
from snugfit.prediction.rates import rates_for
from snugfit.prediction.worker_pool import worker_pool
from snugfit.techniques import roster
from snugfit.techniques.technique import Fidelity

PATIENCE = 2
"""Number of successively larger numbers of GPUs that are not cheaper, after which the search ends
(chosen)."""


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
    workers = workers_of(workers)
    refused: dict[str, str] = {}
    doubts: dict[str, None] = {}
    screened = 0
    if known:
        margins = [headroom_of(headroom, gpu, one_of_many=True) for gpu in known]
        bounds = [(gpu.memory_bytes or 0) - margin for gpu, margin in zip(known, margins, strict=True)]
        jobs = [built_where_it_fits(job, bound) for bound in bounds]
        alike = _alike(known, jobs)
        with worker_pool(partial(Judge, job, *known), workers=workers) as pool:
            figures = SharedFigures(pool)
            for at, gpu in enumerate(known):
                tell(f"simulating on few layers, {screened} recipes done, for {gpu.name}")
                judge = figures.judge_for(at, alike[at], jobs[at].build_on)
                one = SearchOfKind(jobs[at], bounds[at], fixed, even, fidelity_of(fidelity), judge)
                answers[gpu.key] = _cards_of(one, gpu, even, margins[at], doubts)
                refused |= one.refused
                screened = figures.screened
    return CardPlans(
        job=job,
        fidelity=fidelity_of(fidelity).value,
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
    """Split the kinds of GPU into those with known bytes and seconds, and answers with the reason for the
    rest, by key."""
    known, answers = [], {}
    for gpu in kinds:
        try:
            refuse_gpu(gpu, fixed)
            rates_for(gpu)
            known.append(gpu)
        except GpuError as unknown:
            answers[gpu.key] = CardsOfKind(gpu=gpu, fits=None, why=str(unknown))
    return known, answers


# ---- kinds of GPU ------------------------------------------------------------------------------------------


def _alike(gpus: Sequence[Gpu], jobs: Sequence[Job]) -> list[list[int]]:
    """Return for each kind of GPU the indices of those that run the same kernels and build the model in the
    same place."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    every = []
    for index, (gpu, job) in enumerate(zip(gpus, jobs, strict=True)):
        every.append(groups[policy_for(gpu, Software()).decisions, job.build_on])
        every[-1].append(index)
    return every


def _cards_of(
    search: SearchOfKind, gpu: Gpu, counts: Sequence[int], headroom_bytes: int, doubts: dict[str, None]
) -> CardsOfKind:
    """Return the answer for one kind of GPU, and add its warnings to `doubts`."""
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
    """Yield warnings on the limits of measurements with its techniques for groups of GPUs."""
    if shared.parts == 1:
        return
    for slot in roster.slots_of_several_gpus():
        technique = shared.recipe[slot]
        for warning in technique.warnings(job, gpu.compute_capability):
            yield f"{technique}: {warning}"
