"""Today's fastest recipe for the job of each experiment in the guide, with no more memory than the experiment
takes.

All experiments on one job share one plan. Its Pareto front has the fastest recipe for each amount of memory.
If two recipes differ by less than 3 % of their bytes, it may have the faster one only. An experiment that
this GPU cannot run, or that does not fit, may use all of the GPU's memory.

The caller provides the plans, because this module may not import `planning`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from snugfit.features.guide.predictions import PredictionRequest, predict_all
from snugfit.features.guide.result import (
    GuideResult,
    GuideRow,
    LargeModelRow,
    ModernRow,
    TakenInstead,
)
from snugfit.features.guide.suite import LargeModel, job_of, large_models, suite
from snugfit.job.gpu import find_gpu
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.results.prediction import Prediction
    from snugfit.results.speed import StepSpeed


@dataclass(frozen=True, kw_only=True)
class FrontRecipe:
    """A recipe of a plan's Pareto front, with its memory and its speed."""

    recipe: Recipe
    needed_bytes: int
    """Bytes that the recipe needs on the GPU."""
    speed: StepSpeed
    """Predicted speed of the recipe's step."""


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """The Pareto front of recipes that a plan found for one job."""

    front: tuple[FrontRecipe, ...]
    """Recipes of the Pareto front of memory and speed: no other is at least as fast and as small."""
    doubts: tuple[str, ...] = ()
    """Warnings about uncertain parts of the plan."""


def with_modern(result: GuideResult, plan_of: Callable[[Job], PlannedJob]) -> GuideResult:
    """Return the guide's result with today's fastest recipe for each experiment.

    `plan_of` plans a job for the result's GPU, and is called once for each distinct job.
    """
    jobs = {experiment.name: experiment.job() for experiment in suite()}
    plans: dict[str, PlannedJob] = {}
    for job in jobs.values():
        if str(job.to_json()) not in plans:
            plans[str(job.to_json())] = plan_of(job)
    rows = [
        _modern_row(row, plans[str(jobs[row.name].to_json())].front, result.memory_bytes)
        for row in result.rows
    ]
    doubts = [doubt for planned in plans.values() for doubt in planned.doubts]
    return replace(result, modern=tuple(rows), doubts=tuple(dict.fromkeys((*result.doubts, *doubts))))


def _modern_row(row: GuideRow, front: Sequence[FrontRecipe], gpu_bytes: int | None) -> ModernRow:
    """Return the fastest recipe of a plan's Pareto front that takes no more memory than the guide's
    experiment.
    """
    # If the experiment does not fit, its replacement may use all of the GPU's memory.
    memory = row.predicted_bytes if row.fits else gpu_bytes
    modern = ModernRow(name=row.name, memory_bytes=memory)
    fitting = [recipe for recipe in front if memory is None or recipe.needed_bytes <= memory]
    if not fitting:
        return replace(modern, why_none="no recipe of the plan is as small")
    best = min(fitting, key=lambda recipe: recipe.speed.step_seconds)
    then = row.predicted_speed if row.fits else None
    if then and then.step_seconds <= best.speed.step_seconds:
        return replace(modern, why_none="no recipe of the plan is faster in as little memory")
    return replace(
        modern,
        recipe=str(best.recipe),
        needed_bytes=best.needed_bytes,
        speed=best.speed,
        instead=() if row.refused else _instead(Recipe.parse(row.recipe), best.recipe),
    )


def _instead(then: Recipe, now: Recipe) -> tuple[TakenInstead, ...]:
    return tuple(
        TakenInstead(slot=slot.value, then=str(then[slot]), now=str(now[slot]))
        for slot in Slot
        if then[slot] != now[slot]
    )


def with_large_models(
    result: GuideResult, *, workers: int = 1, tell: Callable[[str], None] = lambda about: None
) -> GuideResult:
    """Return the guide's result with predictions for large models, each on a separate GPU. For these the
    guide recommends DeepSpeed.

    `workers` processes predict them, and `tell` is called with a line about each.
    """
    models = large_models()
    requests = [
        PredictionRequest(
            about=model.name, job=job_of(model.job), recipe=model.recipe, gpu=find_gpu(model.gpu)
        )
        for model in models
    ]
    answers = predict_all(requests, workers=workers, tell=tell)
    rows = [_large_model_row(model, answer) for model, answer in zip(models, answers, strict=True)]
    doubts = [doubt for answer in answers if not isinstance(answer, str) for doubt in answer.doubts]
    return replace(result, large_models=tuple(rows), doubts=tuple(dict.fromkeys((*result.doubts, *doubts))))


def _large_model_row(model: LargeModel, answer: Prediction | str) -> LargeModelRow:
    row = LargeModelRow(name=model.name, gpu=find_gpu(model.gpu).name, recipe=model.recipe, why=model.why)
    if isinstance(answer, str):
        return replace(row, refused=answer)
    return replace(row, needed_bytes=answer.needed_bytes, fits=answer.fits, speed=answer.speed)
