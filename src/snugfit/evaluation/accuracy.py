"""How good predictions are on jobs that nobody chose: drawn, predicted, measured, and laid side by side.

Predictions are made in worker processes and measurements one after the other in processes of their own, so
a run is measured while later ones are still being predicted. Nothing drawn is left out of the result: a draw
that could not be predicted, or whose run died, keeps its place and says why. The document is written again
after every run, whole each time, so that an interrupted session leaves what it has; `measure_rest` goes on
where one stopped, or measures on one machine what was predicted on another.

Three kinds of draws: a job and a recipe each (how large are errors?), several recipes of each job (is their
order right?), and the best recipes of each job's plan (is its first choice the best?).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from snugfit.comparison.compared_runs import Accuracy, ComparedRun
from snugfit.errors import GpuError, SnugfitError
from snugfit.evaluation.accuracy_files import keep
from snugfit.evaluation.draw import job_for
from snugfit.evaluation.predict_runs import (
    PlannedRecipe,
    predict_again,
    predict_draw,
    predict_drawn_job,
    recipes_of,
)
from snugfit.measurement.stopwatch import WARMUP, steady_steps
from snugfit.prediction.profile import installed_versions
from snugfit.prediction.rates import rates_for
from snugfit.prediction.worker_pool import map_in_processes
from snugfit.techniques.recipe import Recipe

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.prediction.rates import Rates

DEADLINE_SECONDS = 240.0

Tell = Callable[[str], None]
Ranked = Callable[["Job"], Sequence[PlannedRecipe]]
"""A job's best recipes by its plan, the best first. Planning stands beside this room, so whoever knows both
hands it in."""


def accuracy(
    seed: int,
    count: int,
    gpu: Gpu,
    *,
    file: Path,
    measured: bool = True,
    workers: int = 1,
    tell: Tell = lambda line: None,
) -> Accuracy:
    """Draws `count` runs from `seed`, predicts each for `gpu`, measures it here, and keeps all in `file`.

    `tell` hears what is being done. Raises `SnugfitError` when `file` cannot be written.
    """
    tell("predicting the first draw")
    foreseen = map_in_processes(partial(predict_draw, seed, gpu), range(count), workers=workers)
    begun = _begun(gpu, seed, "drawn")
    return _gathered(begun, foreseen, file=file, measured=measured, total=count, tell=tell)


def within_jobs(
    seed: int,
    jobs: int | Sequence[Job],
    recipes: int,
    gpu: Gpu,
    *,
    file: Path,
    measured: bool = True,
    workers: int = 1,
    tell: Tell = lambda line: None,
) -> Accuracy:
    """The same with several drawn recipes of each job; `jobs` are so many drawn ones, or these."""
    tell("predicting the first job")
    if isinstance(jobs, int):
        groups = map_in_processes(
            partial(predict_drawn_job, seed, gpu, recipes), range(jobs), workers=workers
        )
    else:
        asked = partial(_recipes_of, gpu, recipes, seed)
        groups = map_in_processes(asked, list(enumerate(jobs)), workers=workers)
    total = recipes * (jobs if isinstance(jobs, int) else len(jobs))
    begun = _begun(gpu, seed, "within-job")
    return _gathered(begun, chain.from_iterable(groups), file=file, measured=measured, total=total, tell=tell)


def _recipes_of(gpu: Gpu, recipes: int, seed: int, job: tuple[int, Job]) -> list[ComparedRun]:
    return recipes_of(job[1], gpu, recipes, seed=seed, number=job[0])


def drawn_jobs(seed: int, count: int) -> list[Job]:
    """So many drawn jobs that train."""
    return [job_for(seed, number).job for number in range(count)]


def best_of(
    jobs: Sequence[Job],
    count: int,
    ranked: Ranked,
    gpu: Gpu,
    *,
    seed: int | None,
    file: Path,
    measured: bool = True,
    tell: Tell = lambda line: None,
) -> Accuracy:
    """The same with the best `count` recipes of each job's plan. A plan that fails keeps its job's place."""

    def planned() -> Iterator[ComparedRun]:
        for place, job in enumerate(jobs):
            tell(f"planning job {place + 1} of {len(jobs)}: {job.model.name}")
            first = place * count
            try:
                found = ranked(job)[:count]
            except SnugfitError as failure:
                yield ComparedRun(
                    number=first,
                    family=job.model.architecture,
                    job=job,
                    recipe=Recipe(),
                    refused=str(failure),
                )
                continue
            yield from (each.run(job, first + rank) for rank, each in enumerate(found))

    total = count * len(jobs)
    begun = _begun(gpu, seed, "top")
    return _gathered(begun, planned(), file=file, measured=measured, total=total, tell=tell)


def measure_rest(result: Accuracy, *, file: Path, tell: Tell = lambda line: None) -> Accuracy:
    """The draw with what was not measured yet measured here; `file` always holds all of its runs."""
    runs = list(result.runs)
    waiting = [place for place, run in enumerate(runs) if run.outcome is None]
    for done, place in enumerate(waiting):
        tell(f"measuring {done + 1} of {len(waiting)}: {runs[place].job.model.name} · {runs[place].recipe}")
        runs[place], device = see(runs[place])
        result = replace(result, device=result.device or device, runs=tuple(runs))
        keep(result, file)
    return result


def rescore(
    result: Accuracy,
    gpu: Gpu,
    *,
    file: Path,
    rates: Rates | None = None,
    workers: int = 1,
    tell: Tell = lambda line: None,
) -> Accuracy:
    """The draw predicted again with today's code, and these rates or today's. What was measured stands, what
    was foreseen at first is kept, and the document says that its predictions are no forecasts."""
    source = rates.source if rates else _source(gpu)
    runs: list[ComparedRun] = []
    for run in map_in_processes(partial(predict_again, gpu, rates), result.runs, workers=workers):
        runs.append(run)
        tell(f"predicted {len(runs)} of {len(result.runs)} again")
    versions = installed_versions()
    told = f"{datetime.now(UTC):%Y-%m-%d}, with snugfit {versions['snugfit']} and torch {versions['torch']}"
    again = replace(
        result,
        runs=tuple(runs),
        versions=versions,
        original_versions=result.original_versions or result.versions,
        rates=source,
        rescored=told,
    )
    keep(again, file)
    return again


def _begun(gpu: Gpu, seed: int | None, kind: str) -> Accuracy:
    return Accuracy(
        seed=seed,
        gpu=gpu.name,
        device=None,
        versions=installed_versions(),
        runs=(),
        kind=kind,
        rates=_source(gpu),
    )


def _source(gpu: Gpu) -> str:
    """Where this GPU's rates come from; nothing where none are known."""
    try:
        return rates_for(gpu).source
    except GpuError:
        return ""


def _gathered(
    result: Accuracy, foreseen: Iterable[ComparedRun], *, file: Path, measured: bool, total: int, tell: Tell
) -> Accuracy:
    """The runs, measured as they come; `file` always holds those that are done."""
    for place, each in enumerate(foreseen):
        run, device = each, None
        if measured:
            tell(f"measuring {place + 1} of {total}: {run.job.model.name} · {run.recipe}")
            run, device = see(run)
        result = replace(result, device=device or result.device, runs=(*result.runs, run))
        keep(result, file)
        if place + 1 < total:
            tell(f"predicting {place + 2} of {total}")
    return result


def see(run: ComparedRun) -> tuple[ComparedRun, str | None]:
    """The run measured here, in a process of its own; and on what."""
    from snugfit.measurement.measure import measure

    try:
        seen = measure(
            run.job,
            run.recipe,
            warmup=WARMUP,
            steps=steady_steps(run.predicted_step_seconds, host=run.bound == "host"),
            deadline_seconds=DEADLINE_SECONDS,
            ledger=None,
        )
    except SnugfitError as refusal:
        return replace(run, outcome="refused", message=str(refusal)), None
    done = replace(
        run,
        outcome=seen.outcome,
        measured=seen.footprint,
        step_seconds=seen.timing.step_seconds if seen.timing else None,
        every_step_seconds=seen.timing.every_seconds if seen.timing else None,
        spread=seen.timing.spread if seen.timing else None,
        contaminated=seen.contaminated,
        crowded=seen.crowded,
        disturbed=seen.disturbed,
        message=seen.message,
        when=seen.when,
        versions=seen.versions,
    )
    return done, seen.device.name
