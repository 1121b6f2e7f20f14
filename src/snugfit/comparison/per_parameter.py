"""Bytes per parameter of every optimizer, beside the guide's rule of thumb.

The rule is a sum of constants: 6 bytes for weights in mixed precision, 4 for gradients, 8, 4 or 2 for the
optimizer's states; 18 to train, 6 to infer. Here each figure is read off a rehearsed step of a real model,
on a batch so small that activations hardly count: what is there at the peak, by kind, over the number of
parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from snugfit.comparison.suite import anatomy, job_of
from snugfit.errors import SnugfitError
from snugfit.job.job import Phase
from snugfit.prediction.predict import predict
from snugfit.step.footprint import Kind
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.roster import techniques
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu

FP32_BYTES = 4
INFERENCE = "inference"
"""What stands in the optimizer's place for an evaluation, which has none."""


@dataclass(frozen=True, kw_only=True)
class PerParameter:
    """Bytes per parameter of one optimizer on one model, at the peak of a step on a tiny batch."""

    model: str
    """The model's name."""

    optimizer: str
    """The technique's name, or `inference`."""

    weights: float = 0.0
    """Weights, without autocast's copies."""

    copies: float = 0.0
    """Autocast's 16-bit copies that are there at the peak."""

    gradients: float = 0.0
    """Gradients."""

    states: float = 0.0
    """The optimizer's states."""

    rest: float = 0.0
    """Everything else at the peak: temporaries of the update above all."""

    peak: str = ""
    """The phase that the peak is in."""

    rule_states: float | None = None
    """The guide's bytes for these states; None where it has no rule."""

    rule_total: float | None = None
    """The guide's bytes in all."""

    refused: str = ""
    """Why there is no prediction."""

    @property
    def total(self) -> float:
        """Bytes per parameter in all."""
        return self.weights + self.copies + self.gradients + self.states + self.rest


def per_parameter(gpu: Gpu) -> tuple[PerParameter, ...]:
    """Every optimizer of the roster, and inference, on the guide's two models."""
    return tuple(line for facts in anatomy()["jobs"] for line in _of_model(facts, gpu))


def _of_model(facts: dict[str, object], gpu: Gpu) -> Iterator[PerParameter]:
    rule, precision = anatomy()["rule"], anatomy()["precision"]
    model = str(facts["model"])
    for technique in techniques():
        if technique.slot is not Slot.OPTIMIZER:
            continue
        states = rule["states_of"].get(technique.name)
        total = None if states is None else rule["weights"] + rule["gradients"] + states
        blank = PerParameter(model=model, optimizer=technique.name, rule_states=states, rule_total=total)
        yield _line(blank, facts, f"{precision} + {technique.name}", gpu)
    blank = PerParameter(model=model, optimizer=INFERENCE, rule_states=0, rule_total=rule["inference"])
    yield _line(blank, {**facts, "phase": Phase.EVALUATE}, precision, gpu)


def _line(blank: PerParameter, facts: dict[str, object], recipe: str, gpu: Gpu) -> PerParameter:
    try:
        footprint = predict(job_of(facts), Recipe.parse(recipe), gpu=gpu).footprint
    except SnugfitError as refusal:
        return replace(blank, refused=str(refusal))
    kinds = dict(footprint.kinds)
    parameters = kinds[Kind.WEIGHTS] / FP32_BYTES
    parts = (Kind.WEIGHTS, Kind.CACHES, Kind.GRADIENTS, Kind.OPTIMIZER_STATES)
    weights, copies, gradients, states = (kinds.pop(kind, 0) / parameters for kind in parts)
    return replace(
        blank,
        weights=weights,
        copies=copies,
        gradients=gradients,
        states=states,
        rest=sum(kinds.values()) / parameters,
        peak=footprint.at.phase if footprint.at else "",
    )
