"""Recipes after a memory error on a GPU of the catalog: planned, within the limits of a running
training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from small_models import small_job
from snugfit.frontends.next_recipe import next_recipe
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot
from snugfit.training.journal import Journal, read_journal
from snugfit.training.recovery import Exhausted, PlanFailure, Recovery

CUDA = torch.device("cuda")
BEFORE = Recipe.parse("bf16 + micro_batches(2)")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Fake an H200 whose plan ranks three recipes, and return the arguments of the call to `plan`."""
    ranked = ("bf16 + every_layer", "bf16 + tf32 + micro_batches(4)", "bf16 + every_layer + micro_batches(4)")
    found: dict[str, Any] = {}

    def plan(job: Any, **given: Any) -> Any:
        found.update(given)
        choices = [SimpleNamespace(recipe=each) for each in ranked]
        return SimpleNamespace(best=choices[0], ranked=choices if given["ranked"] else [])

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr("snugfit.planning.search.search.plan", plan)
    needed = SimpleNamespace(needed_bytes=1_000_000)
    monkeypatch.setattr("snugfit.prediction.predict.predict", lambda *given, **more: needed)
    return found


def test_a_live_model_gets_the_fastest_that_it_can_go_on_under(asked: dict[str, Any]) -> None:
    """Its micro-batches are not joined, and the search varies only layers and micro-batches."""
    changing = {Slot.CHECKPOINTING, Slot.BATCHING}
    found = next_recipe(CUDA, live=True, changing=changing)(small_job("bert"), BEFORE, "oom:torch")
    assert str(found) == "bf16 + every_layer + micro_batches(4)"
    assert asked["keep"] == {slot: BEFORE[slot] for slot in Slot if slot not in changing}
    assert asked["memory_bytes"] == 900_000


def test_a_run_that_is_built_once_more_gets_the_fastest_with_the_states_that_it_has(
    asked: dict[str, Any],
) -> None:
    found = next_recipe(CUDA)(small_job("bert"), BEFORE, "oom:torch")
    assert str(found) == "bf16 + every_layer"
    kept = (Slot.PRECISION, Slot.MATMUL, Slot.OPTIMIZER, Slot.ADAPTERS)
    assert {slot: asked["keep"][slot] for slot in kept} == {slot: BEFORE[slot] for slot in kept}
    assert Slot.BATCHING not in asked["keep"]


def test_a_gpu_of_which_nothing_is_known_gets_a_finer_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Made Up 9000")
    found = next_recipe(CUDA, live=True)(small_job("bert"), BEFORE, "oom:torch")
    assert isinstance(found, PlanFailure)
    assert str(found.recipe) == "bf16 + micro_batches(4)"
    assert found.reason.startswith("No GPU 'NVIDIA Made Up 9000' in the table.")


def test_a_finer_cut_in_the_place_of_a_plan_is_told(tmp_path: Path) -> None:
    def unplanned(job: Any, recipe: Recipe, cause: str) -> PlanFailure:
        return PlanFailure(recipe=Recipe.parse("micro_batches(2)"), reason="No GPU of this name.")

    journal = Journal(tmp_path)
    exhausted = Exhausted(cause="oom:torch", phase="forward", message="")
    found = Recovery(small_job("bert"), journal, unplanned).next_recipe(exhausted, Recipe(), 3)
    assert str(found) == "micro_batches(2)"
    assert list(read_journal(tmp_path))[-1]["text"] == (
        "No recipe could be planned: No GPU of this name. 'micro_batches(2)' is tried instead."
    )
