"""Bytes per parameter: the guide's table has every optimizer of the roster, in a precision that it
supports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from snugfit.features.guide.per_parameter import (
    INFERENCE,
    PURE,
    PerParameter,
    per_parameter,
    per_parameter_requests,
)
from snugfit.features.guide.suite import anatomy, job_of
from snugfit.job.gpu import find_gpu
from snugfit.job.model import Model
from snugfit.prediction.predict import predict
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot

OPTIMIZERS = {one.name for one in roster.techniques() if one.slot is Slot.OPTIMIZER}


@pytest.mark.parametrize("facts", anatomy()["jobs"], ids=lambda facts: str(facts["model"]))
def test_every_optimizer_has_a_row_of_each_model(facts: dict[str, object]) -> None:
    job = job_of(facts)
    requests = [one for one in per_parameter_requests(find_gpu("v100-16gb")) if one.job.model == job.model]
    assert {one.about for one in requests} == OPTIMIZERS | {INFERENCE}
    for request in requests:
        recipe = Recipe.parse(request.recipe)
        recipe.check(request.job, installed=False)
        assert request.about in (INFERENCE, recipe[Slot.OPTIMIZER].name)


def test_only_those_that_take_no_other_weights_are_in_bf16() -> None:
    requests = per_parameter_requests(find_gpu("v100-16gb"))
    assert {one.about for one in requests if PURE in one.recipe} == {"adamw_stochastic"}


@pytest.mark.parametrize("name", ["host_adamw", "paged_adamw", "paged_lion"])
def test_states_that_are_not_on_the_gpu_are_said_to_be_elsewhere(name: str) -> None:
    assert name in OPTIMIZERS
    assert name in anatomy()["why"]["states elsewhere"]


def test_states_of_adamw_4bit_have_a_byte_a_weight_and_a_sixteenth() -> None:
    [line] = predicted_lines("adamw_4bit")
    assert line.states == pytest.approx(1 + 8 / 128, rel=0.01)


def test_adamw_stochastic_has_the_weights_that_it_is_for() -> None:
    [line] = predicted_lines("adamw_stochastic")
    assert line.precision == "bf16_pure"
    assert (line.weights, line.gradients, line.states) == pytest.approx((2, 2, 4), rel=0.01)


def predicted_lines(optimizer: str) -> tuple[PerParameter, ...]:
    """Predict two layers of the first model with this optimizer."""
    request = next(one for one in per_parameter_requests(find_gpu("h200")) if one.about == optimizer)
    config = {**request.job.model.config, "num_hidden_layers": 2}
    job = replace(request.job, model=Model.from_config(config, name="shallow"))
    return per_parameter([replace(request, job=job)], [predict(job, request.recipe, gpu=request.gpu)])
