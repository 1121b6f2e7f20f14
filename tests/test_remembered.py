"""What a process remembers from rehearsal to rehearsal changes nothing, and nothing is fetched meanwhile."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from small_models import small_job
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.record import recorder
from snugfit.rehearsal.record.kernels import cost_of
from snugfit.rehearsal.record.shape_cache import KnownCall, Operator, ShapeCache
from snugfit.rehearsal.rehearse import rehearse
from snugfit.step.plain_loop import PlainStep
from snugfit.techniques.recipe import Recipe
from tiers import slow_but

RECIPES = ["fp32 + adamw_loop", "tf32 + adamw_fused", "fp16 + every_layer + micro_batches(2)", "bf16 + sgd"]


@pytest.mark.parametrize("family", slow_but(["bert", "llama"], 1))
def test_what_is_remembered_of_kernels_is_what_they_do(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    cached = ShapeCache.cost

    def both(cache: ShapeCache, operator: Operator, call: KnownCall | None, *operands: Any) -> Any:
        cost = cached(cache, operator, call, *operands)
        assert cost == cost_of(operator.func, *operands), operator.name
        asked.append(operator.name)
        return cost

    monkeypatch.setattr(ShapeCache, "cost", both)
    for recipe in RECIPES * 2:
        rehearse(small_job(family, 2, batch_size=2), Recipe.parse(recipe).setup(), CudaPolicy())
    assert asked


@pytest.mark.parametrize("recipe", slow_but(RECIPES, RECIPES[1:3].__contains__))
def test_a_rehearsal_from_memory_is_the_first_one(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job, setup = small_job("gpt2", 2, batch_size=2), Recipe.parse(recipe).setup()
    rehearse(job, setup, CudaPolicy())
    from_memory = rehearse(job, setup, CudaPolicy())
    monkeypatch.setattr(recorder, "SHAPE_CACHE", ShapeCache())
    assert rehearse(job, setup, CudaPolicy()) == from_memory


def test_nothing_can_be_fetched_while_a_step_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' file with Adafactor imports peft, that bitsandbytes, and that one would fetch kernels."""
    seen, run = [], PlainStep.run

    def watched(*arguments: Any) -> Any:
        seen.append(sys.modules.get("kernels", "importable"))
        return run(*arguments)

    monkeypatch.setattr(PlainStep, "run", watched)
    before = sys.modules.get("kernels", "importable")
    rehearse(small_job("bert", 2), Recipe().setup(), CudaPolicy())
    assert seen == [None]
    assert sys.modules.get("kernels", "importable") == before
