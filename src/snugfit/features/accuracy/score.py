"""Accuracy of predictions: several recipes of each job are predicted, measured and compared.

Worker processes predict. Meanwhile measurements run one after the other, each in its own process. The result
contains every run: a failed prediction or a dead run stays in it with the reason. The result file is
rewritten after every run, so an interruption loses nothing. `measure_rest` measures the remaining runs, also
on another machine than the predictions.

There are two kinds of results. Random recipes test the predicted order. The best recipes of a plan test its
first choice. Developers draw jobs as well (`lab/draw_runs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.errors import GpuError, SnugfitError
from snugfit.features.accuracy.compared_runs import Accuracy, ComparedRun
from snugfit.features.accuracy.files import write
from snugfit.features.accuracy.predict_runs import PlannedRecipe, predict_again, predict_recipes
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
"""The type of a function that returns a job's best planned recipes, the best first. It is an argument because
this module may not import the planner.
"""


class RunWriter(NamedTuple):
    """Writes runs to a result file after their prediction, and measures each one if requested."""

    file: Path
    """The result file, which contains all finished runs at any time."""
    measured: bool = True
    """True if each run is measured on this machine right after its prediction."""
    tell: Tell = lambda line: None
    """Callback that receives progress messages."""

    def record(self, result: Accuracy, predicted: Iterable[ComparedRun], total: int) -> Accuracy:
        """Append these `total` predicted runs to the result, measure them if requested, and return the
        result.

        Raises `SnugfitError` when the file cannot be written.
        """
        for number, predicted_run in enumerate(predicted, 1):
            run, device = predicted_run, None
            if self.measured:
                self.tell(f"measuring {number} of {total}: {_describe(run)}")
                run, device = measure_run(run)
            result = replace(result, device=device or result.device, runs=(*result.runs, run))
            write(result, self.file)
            if number < total:
                self.tell(f"predicting {number + 1} of {total}")
        return result


def accuracy_within_jobs(
    seed: int, jobs: Sequence[Job], recipes: int, gpu: Gpu, writer: RunWriter, *, workers: int = 1
) -> Accuracy:
    """Predict each job under `recipes` random recipes, drawn with `seed`. Write the runs to a file, and
    return the result.
    """
    writer.tell("predicting the first job")
    groups = map_in_processes(
        partial(predict_recipes, seed, gpu, recipes), list(enumerate(jobs)), workers=workers
    )
    runs = chain.from_iterable(groups)
    return writer.record(empty_result(gpu, seed, "within-job"), runs, recipes * len(jobs))


def accuracy_of_best(
    jobs: Sequence[Job], count: int, ranked: Ranked, gpu: Gpu, writer: RunWriter, *, seed: int | None
) -> Accuracy:
    """Predict the best `count` recipes of each job's plan, and write the runs to a file. A failed plan gives
    one run with the reason.
    """

    # A generator measures a job's runs before the next job is planned.
    def plan_all() -> Iterator[ComparedRun]:
        for number, job in enumerate(jobs):
            writer.tell(f"planning job {number + 1} of {len(jobs)}: {job.model.name}")
            first = number * count
            try:
                planned = ranked(job)[:count]
            except SnugfitError as failure:
                yield ComparedRun(
                    number=first,
                    family=job.model.architecture,
                    job=job,
                    recipe=Recipe(),
                    refused=str(failure),
                )
                continue
            yield from (recipe.run(job, first + rank) for rank, recipe in enumerate(planned))

    return writer.record(empty_result(gpu, seed, "top"), plan_all(), count * len(jobs))


def measure_rest(result: Accuracy, *, file: Path, tell: Tell = lambda line: None) -> Accuracy:
    """Measure the runs without a measurement on this machine. Rewrite `file` with all runs after each one."""
    runs = list(result.runs)
    unmeasured = [index for index, run in enumerate(runs) if run.outcome is None]
    for done, index in enumerate(unmeasured):
        tell(f"measuring {done + 1} of {len(unmeasured)}: {_describe(runs[index])}")
        runs[index], device = measure_run(runs[index])
        result = replace(result, device=result.device or device, runs=tuple(runs))
        write(result, file)
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
    """Predict the runs again with the current code, and with `rates` or the current hardware rates.

    The measurements and the first predictions stay. The result marks the new predictions as made after the
    measurements.
    """
    runs: list[ComparedRun] = []
    for run in map_in_processes(partial(predict_again, gpu, rates), result.runs, workers=workers):
        runs.append(run)
        tell(f"predicted {len(runs)} of {len(result.runs)} again")
    versions = installed_versions()
    rescored = (
        f"{datetime.now(UTC):%Y-%m-%d}, with snugfit {versions['snugfit']} and torch {versions['torch']}"
    )
    again = replace(
        result,
        runs=tuple(runs),
        versions=versions,
        # A second rescoring must keep the versions of the original forecasts.
        original_versions=result.original_versions or result.versions,
        rates=rates.source if rates else _rates_source(gpu),
        rescored=rescored,
    )
    write(again, file)
    return again


def empty_result(gpu: Gpu, seed: int | None, kind: str, gpus: int = 1) -> Accuracy:
    """Return an accuracy result without runs, for runs on `gpus` GPUs each."""
    return Accuracy(
        seed=seed,
        gpu=gpu.name,
        device=None,
        versions=installed_versions(),
        runs=(),
        kind=kind,
        rates=_rates_source(gpu, gpus),
    )


def _rates_source(gpu: Gpu, gpus: int = 1) -> str:
    """Return the source of this GPU's hardware rates for `gpus` GPUs at work. Return an empty text without
    rates.
    """
    try:
        return rates_for(gpu, gpus).source
    except GpuError:
        return ""


def _describe(run: ComparedRun) -> str:
    return f"{run.job.model.name} · {run.recipe}"


class MeasuredRun(NamedTuple):
    """A run with its measurement, and the measured device. The device is None if the run could not start."""

    run: ComparedRun
    device: str | None


def measure_run(
    run: ComparedRun, *, loop: str = "plain", trainer_arguments: Mapping[str, Any] | None = None
) -> MeasuredRun:
    """Measure the run on this machine with this training loop, in its own process."""
    from snugfit.measurement.measure import measure

    try:
        measurement = measure(
            run.job,
            run.recipe,
            gpus=run.gpus,
            warmup=WARMUP,
            steps=steady_steps(run.predicted_step_seconds, host=run.bound == "host"),
            deadline_seconds=DEADLINE_SECONDS,
            ledger=None,
            loop=loop,
            trainer_arguments=trainer_arguments,
        )
    except SnugfitError as refusal:
        return MeasuredRun(replace(run, outcome="refused", message=str(refusal)), None)
    timing = measurement.timing
    measured = replace(
        run,
        outcome=measurement.outcome,
        measured=measurement.footprint,
        step_seconds=timing.step_seconds if timing else None,
        every_step_seconds=timing.every_seconds if timing else None,
        spread=timing.spread if timing else None,
        contaminated=measurement.contaminated,
        crowded=measurement.crowded,
        disturbed=measurement.disturbed,
        clock=measurement.clock,
        host_loop_seconds=measurement.host_loop_seconds,
        message=measurement.message,
        when=measurement.when,
        versions=measurement.versions,
    )
    return MeasuredRun(measured, measurement.device.name)
