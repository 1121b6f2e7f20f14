"""Law 1 for tasks on preferences: a real step on the CPU allocates the predicted bytes."""

from __future__ import annotations

import pytest
from small_preferences import preference_job

from aligned import compare, peak
from cpu_scratch import compared
from reported import foreseen, reports
from snugfit.rehearsal.device.policy import CpuPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe

pytestmark = pytest.mark.whole


def hold_to_reports(job, recipe: str) -> None:
    setup = Recipe.parse(recipe).setup()
    trace = compared(foreseen(rehearse(job, setup, CpuPolicy())))
    real = compared(reports(job, setup))
    third = [[event for event in events if event.step == 2] for events in (real, trace)]
    assert all(third)
    comparison = compare(*third)
    assert comparison.similarity == 1.0, f"{job.task}, {recipe}: {comparison}"
    assert peak(real) == peak(trace)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("padding", [0.0, 0.25])
def test_a_real_step_of_a_reward_model_is_predicted(family: str, padding: float) -> None:
    hold_to_reports(preference_job(family, "reward", padding=padding), "plain")


@pytest.mark.parametrize("task", ["dpo", "orpo", "simpo", "kto"])
@pytest.mark.parametrize("recipe", ["plain", "lora"])
def test_a_real_step_of_a_policy_is_predicted(task: str, recipe: str) -> None:
    hold_to_reports(preference_job("llama", task, padding=0.25), recipe)
