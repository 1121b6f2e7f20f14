"""Compiled evaluations and compiled generation, traced by Dynamo and run by eager kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from snugfit.errors import RecipeError
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.measurement.child import results_of
from snugfit.step.open_step import open_step
from snugfit.step.step import Observer
from snugfit.techniques.recipe import Recipe
from tiers import slow_but

pytestmark = pytest.mark.whole

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 96, "max_position_embeddings": 32,
}  # fmt: skip


def small_job(**changes: Any) -> Job:
    fields = {"phase": "evaluate", "batch_size": 2, "sequence_length": 8, **changes}
    return Job(model=Model.from_config(LLAMA, name="llama"), **fields)


@pytest.mark.parametrize(
    ("phase", "recipe", "programs"),
    slow_but(
        [
            # Equal layers share a program: their caches would give each its own.
            ({}, "compiled(backend=eager)", 1),
            # One program for the prompt and one for all tokens.
            (
                {"phase": "generate", "phase_settings": {"new_tokens": 6, "cache": "static"}},
                "compiled(what=model, backend=eager)",
                2,
            ),
            ({}, "compiled(what=model, backend=eager)", 1),
        ],
        2,
    ),
)
def test_a_compiled_evaluation_runs_few_programs_with_equal_results(
    phase: dict[str, Any], recipe: str, programs: int
) -> None:
    job = small_job(**phase)
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    step = open_step(job, Recipe.parse(recipe).setup(), "plain", torch.device("cpu"))
    step.run(2, Observer())
    assert counters["stats"]["unique_graphs"] == programs
    found = results_of(step, 0)
    assert found["largest_error"] < 1e-5
    assert found["ids_equal"] is True


def test_a_growing_cache_is_refused_and_no_plan_chooses_it() -> None:
    job = small_job(phase="generate", phase_settings={"new_tokens": 6})
    for recipe in ("compiled", "compiled(what=model)"):
        with pytest.raises(RecipeError, match="compiled again for each token"):
            Recipe.parse(recipe).check(job)
    engine = Recipe.parse("compiled")["engine"]
    assert "measured, and not simulated" in engine.planning_objection(small_job())
    assert not engine.planning_objection(small_job(phase="train"))
