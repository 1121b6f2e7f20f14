"""Predicted runs: what a draw, or a plan, says about a job and a recipe before anybody measures it.

A draw that cannot be predicted is a run too, and says why. So is a recipe that the model turns out not to
take: it is passed over, and named.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from snugfit.comparison.compared_runs import ComparedRun
from snugfit.errors import RecipeError, SnugfitError
from snugfit.evaluation.draw import DrawnJob, job_for, proposals, recipes_for
from snugfit.prediction.predict import predict
from snugfit.results.footprint import Footprint
from snugfit.techniques.recipe import Recipe

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.prediction.rates import Rates

MOST_TRIED = 6
"""Recipes that are predicted for each that is wanted of a job, before the job has no more."""


@dataclass(frozen=True, kw_only=True)
class PlannedRecipe:
    """A recipe as a plan states it."""

    recipe: Recipe
    """The recipe."""

    footprint: Footprint
    """Its bytes."""

    step_seconds: float
    """Its steady step."""

    fits: bool = True
    """Whether that fits what may be used."""

    def run(self, job: Job, number: int, family: str | None = None) -> ComparedRun:
        """The run of this recipe before it is measured."""
        return ComparedRun(
            number=number,
            family=family or job.model.architecture,
            job=job,
            recipe=self.recipe,
            predicted=self.footprint,
            fits=self.fits,
            predicted_step_seconds=self.step_seconds,
        )


def predict_draw(seed: int, gpu: Gpu, number: int) -> ComparedRun:
    """The draw of this number, predicted. A recipe that the model turns out not to take is passed over."""
    found = next(_predicted(proposals(seed, number), gpu), None)
    if found is None:
        raise SnugfitError(f"Draw {number} of seed {seed} gave no lawful job and recipe.")
    return found


def predict_drawn_job(seed: int, gpu: Gpu, recipes: int, number: int) -> list[ComparedRun]:
    """The drawn job of this number under so many drawn recipes, which all take different bytes; fewer where
    the job has no more."""
    drawn = job_for(seed, number)
    return recipes_of(drawn.job, gpu, recipes, seed=seed, number=number, family=drawn.family)


def recipes_of(
    job: Job, gpu: Gpu, recipes: int, *, seed: int, number: int = 0, family: str | None = None
) -> list[ComparedRun]:
    """A job under so many drawn recipes; `number` is the job's place among the jobs."""
    first, kept, seen = number * recipes, list[ComparedRun](), set[int | None]()
    offered = (
        DrawnJob(number=first, family=family or job.model.architecture, job=job, recipe=recipe)
        for recipe, _ in zip(recipes_for(job, seed), range(MOST_TRIED * recipes), strict=False)
    )
    for run in _predicted(offered, gpu):
        size = run.predicted.requested_bytes if run.predicted else None
        if size is None or size not in seen:
            seen.add(size)
            kept.append(replace(run, number=first + len(kept)))
        if len(kept) == recipes:
            break
    return kept


def predict_again(gpu: Gpu, rates: Rates | None, run: ComparedRun) -> ComparedRun:
    """A run as it is foreseen today; what was foreseen at first is kept beside it, and what was measured
    stands."""
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
        return _filled(blank, gpu, rates)
    except Exception as failure:  # a run that can no longer be predicted is a result
        return replace(blank, refused=_one_line(failure))


def _predicted(offered: Iterable[DrawnJob], gpu: Gpu) -> Iterator[ComparedRun]:
    """The offers as runs; those whose recipe the model does not take are named by the next that it does."""
    passed_over: list[str] = []
    for drawn in offered:
        run = ComparedRun(
            number=drawn.number,
            family=drawn.family,
            job=drawn.job,
            recipe=drawn.recipe,
            passed_over=tuple(passed_over),
        )
        try:
            yield _filled(run, gpu)
        except RecipeError as refusal:
            passed_over.append(f"{drawn.job.model.name}, {drawn.recipe}: {refusal}")
            continue
        except Exception as failure:  # a draw that fails is a result, whatever failed
            yield replace(run, refused=_one_line(failure))
        passed_over.clear()


def _filled(run: ComparedRun, gpu: Gpu, rates: Rates | None = None) -> ComparedRun:
    """The run with its prediction."""
    began = time.monotonic()
    seen = predict(run.job, run.recipe, gpu=gpu, rates=rates)
    return replace(
        run,
        predicted=seen.footprint,
        fits=seen.fits,
        predicted_step_seconds=seen.timing.step_seconds if seen.timing else None,
        bound=seen.timing.bound if seen.timing else None,
        doubts=seen.doubts,
        prediction_seconds=round(time.monotonic() - began, 2),
    )


def _one_line(failure: Exception) -> str:
    kind = "" if isinstance(failure, SnugfitError) else f"{type(failure).__name__}: "
    return kind + " ".join(str(failure).split())
