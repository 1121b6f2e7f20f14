"""Biases that train beside the adapters are those of peft, and a step allocates their gradients and states
(law 1)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from snugfit.step.build import build_model
from snugfit.techniques.recipe import Recipe
from test_law_rehearsed_equals_real import hold_to_reports, job
from tiers import slow_but


def trained(model: Any) -> set[str]:
    """Return the names of the weights with gradients."""
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_the_biases_that_train_are_those_of_peft(bias: Any) -> None:
    from peft import LoraConfig, TaskType, get_peft_model

    here, meta = job("bert"), torch.device("meta")
    config = LoraConfig(target_modules=["query"], bias=bias, task_type=TaskType.SEQ_CLS)
    theirs = trained(get_peft_model(build_model(here, Recipe().setup(), meta), config))
    ours, none = (
        trained(build_model(here, Recipe.parse(text).setup(), meta))
        for text in (f"lora(targets=query, bias={bias})", "lora(targets=query)")
    )
    assert ours == theirs
    assert any("LayerNorm.bias" in name for name in ours - none) == (bias == "all")
    assert all(name.endswith("bias") for name in ours - none)


@pytest.mark.whole
@pytest.mark.parametrize(
    "recipe", slow_but(["lora(bias=all)", "lora(targets=all-linear, bias=lora_only) + fused"], 1)
)
def test_a_real_step_with_biases_allocates_what_its_trace_says(recipe: str) -> None:
    hold_to_reports(job("bert"), Recipe.parse(recipe))
