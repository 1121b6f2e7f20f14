"""Updates within the backward pass, clipped by the norm of the step before: one pass, and the same numbers as
kept gradients that are clipped so.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_again import captured_on_cpu
from test_released import job_of, run, states_by_name

from small_models import small_job
from small_runs import assert_same_weights, bert_job, resumed_as_whole, small_run
from snugfit.errors import RecipeError
from snugfit.features.engine.masters.adamw import norm_in_fp32
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.step import clipping
from snugfit.techniques.recipe import Recipe
from third_step import hold_third_step
from tiers import slow_but

CLIP = 0.05
RECIPES = (
    "adamw_fused",
    "sgd",
    "bf16 + every_layer",
    "bf16_pure + adamw_8bit",
    "bf16_master + adamw_compact",
)


def clip_late(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Let loops with kept gradients clip by the norm of the step before. Return the norms of the steps."""
    norms: list[torch.Tensor] = []

    def late_norm(weights: Any) -> torch.Tensor:
        norms.append(norm_in_fp32([weight.grad for weight in weights if weight.grad is not None]))
        return norms[max(0, len(norms) - 2)]

    def clip_grad_norm(weights: Any, max_norm: float) -> None:
        torch.nn.utils.clip_grads_with_norm_(weights, max_norm, late_norm(weights))

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_grad_norm)
    monkeypatch.setattr(clipping, "gradient_norm", lambda optimizer, weights: late_norm(weights))
    return norms


@pytest.mark.whole
@pytest.mark.parametrize(
    "recipe", slow_but(RECIPES, lambda recipe: recipe not in ("sgd", "bf16 + every_layer"))
)
def test_weights_and_states_are_those_of_kept_gradients(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("bert", CLIP)
    with monkeypatch.context() as patched:
        norms = clip_late(patched)
        kept, expected = run(recipe, job)
    late, ours = run(f"{recipe} + released_late", job)
    assert len(norms) == 3
    assert min(norms) > CLIP, "every step is clipped"
    assert ours == expected
    assert_same_weights(late.model, kept.model)
    one, other = (states_by_name(step) for step in (kept, late))
    assert one.keys() == other.keys()
    assert all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(other[name][key]))
        for name, state in one.items()
        for key, value in state.items()
    )
    released, _ = run(f"{recipe} + released", job)
    pairs = zip(released.model.parameters(), late.model.parameters(), strict=True)
    assert not all(torch.equal(*pair) for pair in pairs), "its own norm is another"


@pytest.mark.whole
def test_replayed_passes_are_those_of_the_loop() -> None:
    job, recipe = job_of("bert", CLIP), "bf16_master + adamw_compact + released_late"
    written, expected = run(recipe, job)
    with captured_on_cpu() as graphs:
        replayed, ours = run(f"{recipe} + captured", job)
    assert ours == expected
    assert_same_weights(replayed.model, written.model)
    # The second step runs without graphs, and the third replays a forward and a backward graph.
    assert graphs[0].played == 2


@pytest.mark.whole
def test_a_resumed_run_clips_by_the_norm_of_its_checkpoint(tmp_path: Path) -> None:
    job, recipe = bert_job(clip=CLIP), "bf16_master + released_late"
    resumed_as_whole(small_run(tmp_path, recipe, job=job, save_steps=5), 8)


@pytest.mark.whole
@pytest.mark.parametrize("recipe", slow_but(["adamw_fused", "bf16_master + adamw_compact"], 1))
def test_a_real_step_allocates_what_its_trace_says(recipe: str) -> None:
    hold_third_step(job_of("bert", 1.0), Recipe.parse(f"{recipe} + released_late").setup())


def test_a_step_has_one_pass_and_no_kept_gradients() -> None:
    job = replace(small_job("llama", 4, batch_size=1), clip=1.0)
    traces = [
        rehearse(job, Recipe.parse(f"bf16_master{more}").setup(), CudaPolicy())
        for more in ("", " + released_late")
    ]
    forward = [sum(one.flops for one in trace.kernels if one.phase == "forward") for trace in traces]
    assert forward[0] == forward[1] > 0
    names = [kernel.operator for kernel in traces[1].kernels]
    assert names.count("triton::adamw_of_weight") == names.count("triton::squares_of_gradient") > 20


def test_a_job_without_clipping_has_an_error() -> None:
    with pytest.raises(RecipeError, match=r"the job does not clip gradients.*Try 'released'"):
        Recipe.parse("released_late").check(small_job("llama", 2), installed=False)
