"""Law 1 for tasks on preferences: a real step on the CPU allocates the predicted bytes."""

from __future__ import annotations

import bisect
from dataclasses import replace
from typing import Any

import pytest
from small_preferences import preference_job

from aligned import compare, peak
from cpu_scratch import compared
from reported import foreseen, reports
from small_runs import CPU
from snugfit.job.batch import synthetic
from snugfit.job.job import Job
from snugfit.rehearsal import few_layers
from snugfit.rehearsal.device.policy import CpuPolicy, CudaPolicy
from snugfit.rehearsal.few_layers import rehearse_from_few_layers
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Trace
from snugfit.step.applier import forward_context
from snugfit.step.build import build_model
from snugfit.techniques.recipe import Recipe
from tiers import crossed, slow_but

pytestmark = pytest.mark.whole


def hold_to_reports(job: Job, recipe: str) -> None:
    setup = Recipe.parse(recipe).setup()
    trace = compared(foreseen(rehearse(job, setup, CpuPolicy())))
    real = compared(reports(job, setup))
    third = [[event for event in events if event.step == 2] for events in (real, trace)]
    assert all(third)
    comparison = compare(*third)
    assert comparison.similarity == 1.0, f"{job.task}, {recipe}: {comparison}"
    assert peak(real) == peak(trace)


@pytest.mark.parametrize(("family", "padding"), crossed(["llama", "gpt2", "bert"], [0.0, 0.25]))
def test_a_real_step_of_a_reward_model_is_predicted(family: str, padding: float) -> None:
    hold_to_reports(preference_job(family, "reward", padding=padding), "plain")


@pytest.mark.parametrize(("task", "recipe"), crossed(["dpo", "orpo", "simpo", "kto"], ["plain", "lora"]))
def test_a_real_step_of_a_policy_is_predicted(task: str, recipe: str) -> None:
    hold_to_reports(preference_job("llama", task, padding=0.25), recipe)


@pytest.mark.parametrize(
    ("task", "recipe", "settings"),
    slow_but(
        [
            ("grpo", "lora + every_layer + micro_batches(2)", {"beta": 0.1, "completion_length": 5}),
            ("rloo", "plain", {"old_log_probs": True}),
            ("grpo", "plain", {"rollouts": 16}),
        ],
        2,
    ),
)
def test_a_real_step_over_rollouts_is_predicted(task: str, recipe: str, settings: dict[str, Any]) -> None:
    hold_to_reports(preference_job("llama", task, phase_settings=settings), recipe)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "recipe"), slow_but([("llama", "every_layer"), ("gemma2", "lora")], 1))
def test_rollouts_take_as_much_as_a_generation(family: str, recipe: str) -> None:
    settings = {"rollouts": 64, "completion_length": 150}
    job = preference_job(family, "grpo", 3, batch_size=1, sequence_length=200, phase_settings=settings)
    generation = replace(
        job, task="causal-lm", phase="generate", batch_size=64, sequence_length=50,
        phase_settings={"new_tokens": 150},
    )  # fmt: skip
    step = rehearse(job, Recipe.parse(recipe).setup(), CudaPolicy())
    whole = rehearse(generation, Recipe.parse("plain").setup(), CudaPolicy())
    assert rise_in(step, "forward") == pytest.approx(rise_in(whole, "prefill", "decode"), rel=0.1)


def rise_in(trace: Trace, *phases: str) -> int:
    """Return the bytes by which live memory rises in these phases of the last step."""
    last = max(mark.step for mark in trace.marks)
    marks = [mark.event for mark in trace.marks]
    live, levels = 0, list[int]()
    for position, event in enumerate(trace.events):
        live += trace.blocks[abs(event) - 1].nbytes * (1 if event > 0 else -1)
        mark = trace.marks[bisect.bisect_right(marks, position) - 1]
        if mark.step == last and mark.phase in phases:
            levels.append(live)
    return max(levels) - levels[0]


@pytest.mark.parametrize(
    ("task", "recipe"),
    slow_but([("dpo", "lora + every_layer"), ("kto", "plain"), ("distill", "lora")], 0),
)
def test_a_deep_model_is_predicted_from_few_layers(
    task: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_layers, "DEEP", 16)
    settings = {"teacher": preference_job("llama", "dpo", 3).model} if task == "distill" else {}
    job = preference_job("llama", task, 16, phase_settings=settings)
    setup = Recipe.parse(recipe).setup()
    grown, whole = rehearse_from_few_layers(job, setup, CudaPolicy()), rehearse(job, setup, CudaPolicy())
    assert grown is not None
    assert (grown.peak(), len(grown.kernels)) == (whole.peak(), len(whole.kernels))


@pytest.mark.parametrize(
    ("task", "recipe", "loop"),
    slow_but([("kto", "lora", "accelerate"), ("dpo", "plain", "trainer"), ("kto", "lora", "trainer")], 2),
)
def test_other_loops_have_the_same_peak(task: str, recipe: str, loop: str) -> None:
    job, setup = preference_job("llama", task, padding=0.25, sequence_length=24), Recipe.parse(recipe).setup()
    predicted = compared(foreseen(rehearse(job, setup, CpuPolicy(), loop=loop)))
    assert peak(compared(reports(job, setup, loop=loop))) == peak(predicted)


@pytest.mark.parametrize(
    "recipe",
    slow_but(
        [
            "fused + every_layer + bf16 + released", "qlora + selective(attention)", "bf16_master",
            "frozen(parts=embed_tokens) + micro_batches(2)", "adamw_8bit + eager",
        ],
        1,
    ),
)  # fmt: skip
def test_techniques_are_predicted_beside_a_reference(recipe: str) -> None:
    hold_to_reports(preference_job("llama", "dpo", padding=0.25), recipe)


@pytest.mark.parametrize("task", slow_but(["kto", "grpo"], 1))
def test_a_pass_without_gradients_leaves_gradients_to_the_next(task: str) -> None:
    """Autocast caches the weights that the first pass casts, with their gradients."""
    job, setup = preference_job("llama", task), Recipe.parse("bf16").setup()
    model = build_model(job, setup, CPU)
    with forward_context(setup, CPU):
        model(**synthetic(job, 2))["loss"].backward()
    assert all(weight.grad is not None for weight in model.parameters())
    trace = rehearse(job, Recipe.parse("bf16 + every_layer").setup(), CudaPolicy())
    assert not any("no gradient" in doubt for doubt in trace.doubts)


@pytest.mark.parametrize("task", slow_but(["kto", "grpo"], 1))
def test_autocast_casts_weights_once_for_all_passes(task: str) -> None:
    hold_to_reports(preference_job("llama", task), "bf16 + every_layer")


@pytest.mark.parametrize(
    ("recipe", "settings"),
    slow_but(
        [
            ("plain", {"completion_length": 5}),
            ("plain", {"lmbda": 0.0, "beta": 0.0}),
            ("lora + bf16 + every_layer + micro_batches(2)", {"teacher_dtype": "bfloat16"}),
        ],
        1,
    ),
)
def test_a_real_step_beside_a_teacher_is_predicted(recipe: str, settings: dict[str, Any]) -> None:
    teacher = preference_job("llama", "dpo", 3).model
    hold_to_reports(
        preference_job("llama", "distill", phase_settings={"teacher": teacher, **settings}), recipe
    )
