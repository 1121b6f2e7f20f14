"""Weights of experts in 4 bits under QLoRA: the numbers of unpacked weights, fewer bytes, recorded steps."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize

from aligned import compare
from cpu_scratch import compared
from reported import foreseen, reports
from small_models import small_job
from small_runs import CPU, resumed_as_whole, small_run
from snugfit.errors import RecipeError
from snugfit.job.job import Job
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.policy import CpuPolicy, CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.step.build import build_model
from snugfit.techniques.recipe import Recipe

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

TARGETS = "targets=q_proj, parameters=experts.gate_up_proj|experts.down_proj"
QLORA = f"qlora(r=8, {TARGETS}, experts=true) + fused"
ROWS = [{"input_ids": [5 + (7 * row + token) % 90 for token in range(6 + row % 9)]} for row in range(42)]


def job(**facts: Any) -> Job:
    return replace(small_job("mixtral", 2, facts=facts), dtype="bfloat16", batch_size=4, sequence_length=16)


def built(recipe: str) -> Any:
    torch.manual_seed(0)
    return build_model(job(), Recipe.parse(recipe).setup(), CPU).train()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return the loss, and the gradients by the end of the name."""
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    tokens = torch.randint(3, 96, (2, 11), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return {
        "loss": loss.detach(),
        **{name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None},
    }


def test_gradients_are_those_of_the_unpacked_weights() -> None:
    packed = built(f"{QLORA} + bf16_pure")
    whole = copy.deepcopy(packed)
    for module in list(whole.modules()):
        for name in list(getattr(module, "parametrizations", {})):
            value = getattr(module, name).clone()
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
            setattr(module, name, torch.nn.Parameter(value, requires_grad=False))
    got, expected = gradients(packed), gradients(whole)
    assert got.keys() == expected.keys()
    assert sum("experts" in name for name in got) == 8
    assert all(torch.equal(got[name], expected[name]) for name in got)


def test_evaluation_unpacks_the_same_numbers() -> None:
    model = built(f"{QLORA} + bf16_pure")
    tokens = torch.arange(3, 14)[None]
    train_logits = model(input_ids=tokens).logits
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens).logits
    torch.testing.assert_close(logits, train_logits, rtol=0.05, atol=0.05)


def test_packed_experts_take_a_little_more_than_a_quarter() -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_local_experts": 16}
    recipes = f"qlora(r=8, {TARGETS}) + fused + bf16_pure", f"{QLORA} + bf16_pure"
    plain, packed = (predict(job(**wide), recipe, gpu="h200") for recipe in recipes)
    numbers = 2 * 16 * 3 * 256 * 512
    kinds = [dict(one.footprint.kinds)["weights"] for one in (plain, packed)]
    assert kinds[0] - kinds[1] == pytest.approx(numbers * (2 - 0.516), rel=0.01)
    assert any("experts stay in" in doubt for doubt in plain.doubts) or kinds[0] < 64 << 20
    assert not any("experts stay in" in doubt for doubt in packed.doubts)


@pytest.mark.whole
def test_a_real_step_allocates_what_its_trace_says() -> None:
    """Only steps are compared: on a CPU bitsandbytes packs in plain torch, with temporaries of its own."""
    setup = Recipe.parse(f"{QLORA} + bf16_pure").setup()
    accounts = compared(reports(job(), setup)), compared(foreseen(rehearse(job(), setup, CpuPolicy())))
    third = [[event for event in account if event.step == 2] for account in accounts]
    assert all(third)
    assert compare(*third).similarity == 1.0


def test_a_step_is_recorded() -> None:
    setup = Recipe.parse(f"{QLORA} + bf16_master + captured").setup()
    trace = rehearse(job(), setup, CudaPolicy())
    assert not any("cannot be recorded" in doubt for doubt in trace.doubts)


@pytest.mark.whole
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    recipe = f"{QLORA} + bf16_pure"
    resumed_as_whole(small_run(tmp_path, recipe, job=job(), samples=ROWS, max_steps=6, save_steps=2), 5)


@pytest.mark.parametrize(
    ("recipe", "family", "why"),
    [
        (f"qlora({TARGETS}, experts=true)", "mixtral", "Add 'fused'"),
        (f"qlora({TARGETS}, experts=true, bits=8) + fused", "mixtral", "needs bits=4"),
        ("qlora(experts=true) + fused", "llama", "has no experts"),
    ],
)
def test_unsupported_combinations_are_refused(recipe: str, family: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        Recipe.parse(recipe).check(small_job(family, 2), installed=False)
