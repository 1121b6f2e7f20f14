"""Predicts drawn jobs and recipes, and turns them and planned ones into runs that can be measured.

A draw that cannot be predicted is a run too, and says why. A recipe that the model turns out not to take is
skipped, and the next run names it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from snugfit.comparison.compared_runs import ComparedRun
from snugfit.errors import RecipeError, SnugfitError
from snugfit.evaluation.draw import DrawnJob, draw_recipes, proposals
from snugfit.prediction.predict import predict
from snugfit.results.footprint import Footprint
from snugfit.techniques.recipe import Recipe

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.prediction.rates import Rates

MAX_PREDICTED = 6
"""Recipes that are predicted for each requested one of a job, before the job counts as exhausted."""


@dataclass(frozen=True, kw_only=True)
class PlannedRecipe:
    """A recipe with the figures that a plan predicts for it."""

    recipe: Recipe
    footprint: Footprint
    step_seconds: float
    """Of a steady step."""
    fits: bool = True
    """Whether the bytes fit the memory that may be used."""

    def run(self, job: Job, number: int) -> ComparedRun:
        """The run of this recipe before it is measured."""
        return ComparedRun(
            number=number,
            family=job.model.architecture,
            job=job,
            recipe=self.recipe,
            predicted=self.footprint,
            fits=self.fits,
            predicted_step_seconds=self.step_seconds,
        )


def predict_draw(seed: int, gpu: Gpu, number: int, *, gpus: int = 1) -> ComparedRun:
    """The draw of this number, predicted for so many GPUs. A recipe that the model turns out not to take is
    skipped."""
    run = next(_predict_each(proposals(seed, number, gpus), gpu, gpus), None)
    if run is None:
        raise SnugfitError(f"Draw {number} of seed {seed} gave no valid job and recipe.")
    return run


def predict_recipes(seed: int, gpu: Gpu, recipes: int, drawn: DrawnJob) -> list[ComparedRun]:
    """A job under so many drawn recipes, which all take different bytes; fewer where it has no more. The
    recipe that it was drawn with does not count."""
    first, runs, sizes = drawn.number * recipes, list[ComparedRun](), set[int | None]()
    candidates = (
        replace(drawn, number=first, recipe=recipe)
        for recipe, _ in zip(draw_recipes(drawn.job, seed), range(MAX_PREDICTED * recipes), strict=False)
    )
    for run in _predict_each(candidates, gpu):
        size = run.predicted.requested_bytes if run.predicted else None
        if size is None or size not in sizes:
            sizes.add(size)
            runs.append(replace(run, number=first + len(runs)))
        if len(runs) == recipes:
            break
    return runs


def predict_again(gpu: Gpu, rates: Rates | None, run: ComparedRun) -> ComparedRun:
    """The run with today's prediction; the first prediction is kept beside it, and the measurement stays."""
    blank = replace(
        run,
        predicted=None,
        fits=None,
        predicted_step_seconds=None,
        bound=None,
        refused="",
        doubts=(),
        original=run.original or run.predicted,
        original_step_seconds=run.original_step_seconds or run.predicted_step_seconds,
    )
    try:
        return _predict(blank, gpu, rates)
    except Exception as failure:  # a run that can no longer be predicted is a result
        return replace(blank, refused=_one_line(failure))


def _predict_each(candidates: Iterable[DrawnJob], gpu: Gpu, gpus: int = 1) -> Iterator[ComparedRun]:
    """The candidates as runs. Recipes that the model does not take are skipped; the next run names them."""
    passed_over: list[str] = []
    for drawn in candidates:
        run = ComparedRun(
            number=drawn.number,
            family=drawn.family,
            job=drawn.job,
            recipe=drawn.recipe,
            gpus=gpus,
            passed_over=tuple(passed_over),
        )
        try:
            yield _predict(run, gpu)
        except RecipeError as refusal:
            passed_over.append(f"{drawn.job.model.name}, {drawn.recipe}: {refusal}")
            continue
        except Exception as failure:  # a draw that fails is a result, whatever failed
            yield replace(run, refused=_one_line(failure))
        passed_over.clear()


def _predict(run: ComparedRun, gpu: Gpu, rates: Rates | None = None) -> ComparedRun:
    """The run with its prediction."""
    began = time.monotonic()
    prediction = predict(run.job, run.recipe, gpu=gpu, gpus=run.gpus, rates=rates)
    return replace(
        run,
        predicted=prediction.footprint,
        fits=prediction.fits,
        predicted_step_seconds=prediction.timing.step_seconds if prediction.timing else None,
        bound=prediction.timing.bound if prediction.timing else None,
        doubts=prediction.doubts,
        prediction_seconds=round(time.monotonic() - began, 2),
    )


def _one_line(failure: Exception) -> str:
    kind = "" if isinstance(failure, SnugfitError) else f"{type(failure).__name__}: "
    return kind + " ".join(str(failure).split())
