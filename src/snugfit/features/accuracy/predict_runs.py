"""Prediction of randomly drawn recipes, and conversion of recipes to runs that can be measured.

A failed prediction gives a run with the reason for the failure. A recipe that the model does not support is
skipped, and the next run names it.

**Draws.** Random recipes (a training technique for each slot, such as the optimizer) for one job.

A seed and a job give the same recipes on every machine. A recipe may still prove invalid when the model is
built. For example, peft has no targets, or a layer returns more than its hidden state. The caller skips such
a recipe.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from snugfit.errors import RecipeError, SnugfitError
from snugfit.features.accuracy.compared_runs import ComparedRun
from snugfit.job.job import Job
from snugfit.prediction.predict import predict
from snugfit.results.footprint import Footprint
from snugfit.step.applier import refuse_rehearsal
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import on_gpus
from snugfit.techniques.technique import Slot, Technique
from snugfit.techniques.wish import processes_of

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.planning.plan import Choice
    from snugfit.prediction.rates import Rates


MAX_PREDICTED = 6
"""Largest number of random recipes that are predicted for each requested one. Recipes with equal bytes count
once."""


@dataclass(frozen=True, kw_only=True)
class PlannedRecipe:
    """A training recipe with the memory and step time that a plan predicts for it."""

    recipe: Recipe
    footprint: Footprint
    step_seconds: float
    """Predicted seconds of a steady step (a step like all later ones)."""
    fits: bool = True
    """True when the predicted bytes fit into the usable GPU memory."""

    @classmethod
    def of(cls, choice: Choice, memory_bytes: int | None = None) -> Self:
        """Convert an entry of a plan to a `PlannedRecipe` with its predicted memory and step time."""
        footprint = Footprint(
            requested_bytes=choice.requested_bytes,
            allocated_bytes=choice.allocated_bytes,
            reserved_bytes=choice.reserved_bytes,
            nvml_bytes=choice.needed_bytes,
            context_bytes=choice.context_bytes,
        )
        return cls(
            recipe=Recipe.parse(choice.recipe),
            footprint=footprint,
            step_seconds=choice.step_seconds,
            fits=memory_bytes is None or choice.needed_bytes <= memory_bytes,
        )

    def run(self, job: Job, number: int) -> ComparedRun:
        """Return a `ComparedRun` of this job with the predicted memory and step time, and without a
        measurement.
        """
        return ComparedRun(
            number=number,
            family=job.model.architecture,
            job=job,
            recipe=self.recipe,
            predicted=self.footprint,
            fits=self.fits,
            predicted_step_seconds=self.step_seconds,
        )


def predict_recipes(seed: int, gpu: Gpu, recipes: int, numbered: tuple[int, Job]) -> list[ComparedRun]:
    """Predict a job under random recipes, each with a different number of bytes."""
    number, job = numbered
    first, runs, sizes = number * recipes, list[ComparedRun](), set[int | None]()
    candidates = (
        ComparedRun(number=first, family=job.model.architecture, job=job, recipe=recipe)
        # The loop is bounded, because a job may have too few recipes with different bytes.
        for recipe, _ in zip(draw_recipes(job, seed), range(MAX_PREDICTED * recipes), strict=False)
    )
    for run in predict_each(candidates, gpu):
        size = run.predicted.requested_bytes if run.predicted else None
        if size is None or size not in sizes:
            sizes.add(size)
            runs.append(replace(run, number=first + len(runs)))
        if len(runs) == recipes:
            break
    return runs


def predict_again(gpu: Gpu, rates: Rates | None, run: ComparedRun) -> ComparedRun:
    """Predict the run again with the current code. Keep its first prediction and its measurement."""
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
    except Exception as failure:  # a run that can no longer be predicted is recorded
        return replace(blank, refused=_one_line(failure))


def predict_each(candidates: Iterable[ComparedRun], gpu: Gpu) -> Iterator[ComparedRun]:
    """Yield each unpredicted run with its predicted memory and step time.

    Recipes that the model does not support are skipped; the next run names them.
    """
    passed_over: list[str] = []
    for candidate in candidates:
        run = replace(candidate, passed_over=tuple(passed_over))
        try:
            yield _predict(run, gpu)
        except RecipeError as refusal:
            passed_over.append(f"{run.job.model.name}, {run.recipe}: {refusal}")
            continue
        except Exception as failure:  # a failed run is recorded too
            yield replace(run, refused=_one_line(failure))
        passed_over.clear()


def _predict(run: ComparedRun, gpu: Gpu, rates: Rates | None = None) -> ComparedRun:
    """Return the run with its prediction, or with the reason why the prediction failed."""
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


# ---- draws -------------------------------------------------------------------------------------------------


PLAIN_SHARE = 0.6
"""Probability that a slot (group of alternative techniques) keeps its default. All its other techniques are
equally likely."""

ALONE_SHARE = 0.25
"""Probability, on several GPUs, that tensor parallelism is drawn, with which all GPUs train on the whole
batch."""

MAX_PROPOSALS = 2_000
"""Largest number of random recipes that are tried for one job, valid or not."""


def draw_recipes(job: Job, seed: int) -> Iterator[Recipe]:
    """Yield random, distinct and valid recipes for this job, first the one without any technique.

    The seed and the job determine the recipes.
    """
    # Seeded with a text, the generator yields the same numbers in every process.
    rng = random.Random(f"snugfit recipes {seed} {json.dumps(job.to_json(), sort_keys=True)}")
    plain = Recipe()
    yielded = {plain}
    yield plain
    for _ in range(MAX_PROPOSALS):
        recipe = draw_recipe(job, rng)
        if recipe is not None and recipe not in yielded:
            yielded.add(recipe)
            yield recipe


def _divides(technique: Technique, gpus: int) -> bool:
    """Return True if the number of GPUs is a multiple of the process group that this technique needs."""
    processes = processes_of(technique.alone)
    return processes is None or gpus % math.prod(processes.axes.values()) == 0


def _is_simulated(technique: type[Technique]) -> bool:
    return technique.searched or technique.needs_several_gpus


def draw_recipe(job: Job, rng: random.Random, gpus: int = 1) -> Recipe | None:
    """Draw a random technique for each slot (such as the optimizer), with a setting that it proposes for the
    job. Return None for an invalid combination, or one that does not fit this number of GPUs. Installed
    packages are not checked: a missing one fails visibly.
    """
    drawn = []
    for slot in Slot:
        if slot in roster.slots_of_several_gpus() and slot is not Slot.SHARDING:
            continue  # accuracy draws do not cover it yet
        in_slot = [
            candidate
            for candidate in roster.techniques()
            if candidate.slot is slot and _is_simulated(candidate)
        ]
        candidates = [
            candidate
            for candidate in in_slot
            if candidate.plain or candidate.needs_several_gpus is (gpus > 1)
        ]
        if slot not in roster.slots_of_several_gpus():
            candidates = in_slot
        elif len(candidates) == 1:  # the only choice
            drawn.append(candidates[0]())
            continue
        active = [technique for technique in candidates if not technique.plain]
        plain_share = ALONE_SHARE if gpus > 1 and slot is Slot.SHARDING else PLAIN_SHARE
        technique = rng.choice(active) if active and rng.random() >= plain_share else candidates[0]
        settings = [candidate for candidate in technique.settings(job) if _divides(candidate, gpus)] or [
            candidates[0]()
        ]
        drawn.append(rng.choice(settings))
    recipe = Recipe(tuple(drawn))
    try:
        recipe.check(job, installed=False)
        refuse_rehearsal(recipe.setup(), job)
        on_gpus(recipe.setup(), gpus)
    except SnugfitError:
        return None
    return recipe
