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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from snugfit.errors import GpuError, UsageError
from snugfit.features.distributed.plan.cards import CardPlans, CardsOfKind
from snugfit.features.distributed.plan.fastest import Outcome, Screened
from snugfit.features.distributed.plan.judge import Judge
from snugfit.features.distributed.plan.kind import GAIN, SearchesOfKinds, SearchOfKind, counts_of
from snugfit.features.distributed.plan.shared import Shared
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.planning.fleet.kinds import refuse_gpu
from snugfit.planning.fleet.search_gpus import gpus_of
from snugfit.planning.keep import Free, Keep, Kept
from snugfit.planning.plan import Exclusion
from snugfit.planning.search.plan_request import PlanRequest
from snugfit.planning.search.progress import Tell
from snugfit.prediction.profile import installed_versions
from snugfit.prediction.rates import rates_for
from snugfit.techniques import roster
from snugfit.techniques.technique import Fidelity

PATIENCE = 2
"""Number of successively larger numbers of GPUs that are not cheaper, after which the search ends
(chosen)."""


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
    """Return the fewest GPUs of each kind that train the job, and larger numbers that take fewer GPU seconds.

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
