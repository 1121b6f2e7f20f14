"""Predicted bytes per parameter with every optimizer, next to the guide's rule of thumb.

The rule adds constants: 6 bytes for weights in mixed precision, 4 for gradients, and 8, 4 or 2 for states.
With AdamW, that is 18 bytes for training and 6 for inference. Here each number comes from a simulated step of
a real model, on a batch so small that activations hardly count. It is the peak memory of each category,
divided by the number of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from snugfit.errors import RecipeError
from snugfit.features.guide.predictions import PredictionRequest
from snugfit.features.guide.suite import anatomy, job_of
from snugfit.job.job import Phase
from snugfit.results.footprint import Kind
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.roster import techniques
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.results.prediction import Prediction

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one weight, by dtype."""
PURE = "bf16_pure"
"""Precision for optimizers that support only bfloat16 weights."""
INFERENCE = "inference"
"""Word in place of an optimizer's name for a model in evaluation."""


@dataclass(frozen=True, kw_only=True)
class PerParameter:
    """Peak bytes per parameter with one optimizer on one model, in a step on a tiny batch."""

    model: str
    optimizer: str
    """Name of the optimizer technique, or `inference`."""
    precision: str = ""
    """Precision technique of the prediction."""
    weights: float = 0.0
    """Bytes per parameter for weights, without autocast's copies."""
    copies: float = 0.0
    """Bytes per parameter for autocast's 16-bit copies at the memory peak."""
    gradients: float = 0.0
    states: float = 0.0
    rest: float = 0.0
    """Bytes per parameter for everything else at the memory peak, mainly temporaries of the update."""
    peak: str = ""
    """Phase of the step in which memory peaks."""
    rule_states: float | None = None
    """The guide's bytes per parameter for the optimizer's states; None if the guide has no rule."""
    rule_total: float | None = None
    """The guide's bytes per parameter in total; None if the guide has no rule."""
    refused: str = ""
    """Reason for a missing prediction; empty for none."""

    @property
    def total(self) -> float:
        """The sum over all memory categories, in bytes per parameter."""
        return self.weights + self.copies + self.gradients + self.states + self.rest


def per_parameter_requests(gpu: Gpu) -> list[PredictionRequest]:
    """Return the predictions to make for every optimizer, and for inference, on each of the guide's
    models.
    """
    precision = anatomy()["precision"]
    requests = []
    for facts in anatomy()["jobs"]:
        job = job_of(facts)
        for technique in techniques():
            if technique.slot is Slot.OPTIMIZER:
                recipe = _recipe_of(technique.name, job, precision)
                requests.append(PredictionRequest(about=technique.name, job=job, recipe=recipe, gpu=gpu))
        job = job_of({**facts, "phase": Phase.EVALUATE})
        requests.append(PredictionRequest(about=INFERENCE, job=job, recipe=precision, gpu=gpu))
    return requests


def _recipe_of(optimizer: str, job: Job, precision: str) -> str:
    """Return the recipe for an optimizer in the guide's precision, or in bfloat16 throughout if it supports
    no other weights."""
    recipes = [f"{name} + {optimizer}" for name in (precision, PURE)]
    return next((name for name in recipes if _goes(name, job)), recipes[0])


def _goes(recipe: str, job: Job) -> bool:
    try:
        Recipe.parse(recipe).check(job, installed=False)
    except RecipeError:
        return False
    return True


def per_parameter(
    requests: Sequence[PredictionRequest], answers: Sequence[Prediction | str]
) -> tuple[PerParameter, ...]:
    """Return the bytes per parameter for each of `per_parameter_requests`, from its prediction in
    `answers`.
    """
    return tuple(_line(request, answer) for request, answer in zip(requests, answers, strict=True))


def _trained_dtype(request: PredictionRequest) -> str:
    return Recipe.parse(request.recipe).setup().trained_dtype(request.job)


def _line(request: PredictionRequest, answer: Prediction | str) -> PerParameter:
    rule = anatomy()["rule"]
    precision = Recipe.parse(request.recipe)[Slot.PRECISION].name
    line = PerParameter(model=request.job.model.name, optimizer=request.about, precision=precision)
    if request.about == INFERENCE:
        line = replace(line, rule_states=0, rule_total=rule["inference"])
    elif request.about in rule["states_of"]:
        states = rule["states_of"][request.about]
        line = replace(line, rule_states=states, rule_total=rule["weights"] + rule["gradients"] + states)
    if isinstance(answer, str):
        return replace(line, refused=answer)
    footprint = answer.footprint
    kinds = dict(footprint.kinds)
    # All weights have one dtype, so the number of parameters follows from their bytes.
    parameters = kinds[Kind.WEIGHTS] / BYTES[_trained_dtype(request)]
    parts = (Kind.WEIGHTS, Kind.CACHES, Kind.GRADIENTS, Kind.OPTIMIZER_STATES)
    weights, copies, gradients, states = (kinds.pop(kind, 0) / parameters for kind in parts)
    return replace(
        line,
        weights=weights,
        copies=copies,
        gradients=gradients,
        states=states,
        rest=sum(kinds.values()) / parameters,
        peak=footprint.at.phase if footprint.at else "",
    )
