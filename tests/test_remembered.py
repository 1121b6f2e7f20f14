"""Caches between the rehearsals of a process change no result and fetch nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from small_models import small_job
from snugfit import hub_kernels
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.record import recorder
from snugfit.rehearsal.record.kernels import cost_of
from snugfit.rehearsal.record.shape_cache import KnownCall, Operator, ShapeCache
from snugfit.rehearsal.rehearse import rehearse
from snugfit.step.accelerate_loop import AccelerateStep
from snugfit.step.plain_loop import PlainStep
from snugfit.step.trainer_loop import TrainerStep
from snugfit.techniques.recipe import Recipe
from tiers import slow_but

LOOPS: dict[str, Any] = {"plain": PlainStep, "accelerate": AccelerateStep, "trainer": TrainerStep}
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
    for recipe in [*RECIPES, *RECIPES[2:3]]:
        rehearse(small_job(family, 2, batch_size=2), Recipe.parse(recipe).setup(), CudaPolicy())
    assert asked


@pytest.mark.parametrize("recipe", slow_but(RECIPES, RECIPES[2:3].__contains__))
def test_a_rehearsal_from_memory_is_the_first_one(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job, setup = small_job("gpt2", 2, batch_size=2), Recipe.parse(recipe).setup()
    rehearse(job, setup, CudaPolicy())
    from_memory = rehearse(job, setup, CudaPolicy())
    monkeypatch.setattr(recorder, "SHAPE_CACHE", ShapeCache())
    assert rehearse(job, setup, CudaPolicy()) == from_memory


@pytest.mark.parametrize("loop", LOOPS)
def test_nothing_can_be_fetched_while_a_step_is_rehearsed(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' Adafactor module imports peft, which imports bitsandbytes, which would fetch kernels.

    accelerate and the Trainer import peft, too, so the test imports it before them.
    """
    seen, run, imported = [], LOOPS[loop].run, list[str]()
    monkeypatch.setattr(hub_kernels, "_import_without_hub", imported.append)

    def watched(*arguments: Any) -> Any:
        seen.append(sys.modules.get("kernels", "importable"))
        return run(*arguments)

    monkeypatch.setattr(LOOPS[loop], "run", watched)
    before = sys.modules.get("kernels", "importable")
    rehearse(small_job("bert", 2), Recipe().setup(), CudaPolicy(), loop=loop)
    assert seen == [None]
    assert imported == ["peft"] * (loop != "plain")
    assert sys.modules.get("kernels", "importable") == before


def test_a_package_is_imported_without_what_would_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels.py").write_text("raise RuntimeError('it is imported')\n")
    (tmp_path / "fetches.py").write_text("try:\n    import kernels\nexcept ImportError:\n    found = False\n")
    monkeypatch.syspath_prepend(tmp_path)
    hub_kernels._import_without_hub("fetches")
    assert sys.modules.pop("fetches").found is False


def test_a_foreach_operator_computes_each_kind_of_element_once() -> None:
    """A deep model's update has thousands of equal elements. A mismatched element is still refused."""
    adds, cache = torch.ops.aten._foreach_addcdiv_.Scalar, ShapeCache()
    small, large = torch.empty(4, device="meta"), torch.empty(8, 4, device="meta")
    lists = ([small, large, small], [small, large, small], [small, large, small])
    computed: list[int] = []

    class Counted(Operator):
        def __init__(self) -> None:
            super().__init__(adds)
            self.func = lambda *given: (computed.append(len(given[0])), adds(*given))[1]

    operator, call = Counted(), KnownCall()
    cache.run(operator, call, (*lists, -0.1), {})
    assert computed == [2]
    assert call.result is True
    with pytest.raises(RuntimeError):
        cache.run(operator, KnownCall(), ([small, large], [small, small], [small, large[:3]], -0.1), {})
