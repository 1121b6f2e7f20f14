"""Recompute the first k layers.

The gradients equal those of `keep_all` bit for bit. Bytes and kernels are between those of no layer and of
every layer. One test shows the reason for the first layers rather than the last.
"""

from __future__ import annotations

import importlib
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kept import REST
from small_models import small_job
from snugfit.job.job import Job, Task
from snugfit.planning.search.search import plan
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Trace
from snugfit.step.build import build_model
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import CheckpointWish
from snugfit.techniques.technique import Slot
from test_law_loops import hold
from test_law_rehearsed_equals_real import hold_to_reports, job
from tiers import slow_but

LAYERS = 5


def gradients(family: str, recipe: str, *, autocast: bool) -> dict[str, Tensor]:
    """Return the gradients of a model with dropout and padding, built from a fixed seed."""
    this = job(family)
    torch.manual_seed(0)
    model = build_model(this, Recipe.parse(recipe).setup(), torch.device("cpu")).train()
    ids = torch.arange(4 * 16).view(4, 16) % 96
    mask = torch.ones_like(ids)
    mask[1, 10:] = 0
    labels = torch.arange(4) % 2 if this.task is Task.SEQUENCE_CLASSIFICATION else ids
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
    loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize(
    ("family", "recipe", "autocast"),
    [("bert", "sdpa", True), ("gpt2", "eager", False), ("llama", "lora", True), ("t5", "sdpa", False)],
)
def test_gradients_are_those_of_keep_all_bit_for_bit(family: str, recipe: str, autocast: bool) -> None:
    plain = gradients(family, recipe, autocast=autocast)
    some = gradients(family, f"{recipe} + first_layers(1)", autocast=autocast)
    assert plain
    assert plain.keys() == some.keys()
    assert all(torch.equal(plain[name], some[name]) for name in plain)


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("gpt2", "first_layers(1)"),
        ("llama", "lora + bf16_pure + first_layers(1) + micro_batches(2)"),
    ],
)
def test_a_real_step_allocates_what_its_trace_says(family: str, recipe: str) -> None:
    hold_to_reports(job(family), Recipe.parse(recipe))


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize("loop", ["trainer", "accelerate"])
def test_other_loops_recompute_the_same(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("torch.optim.optimizer")  # torch.optim hides it under its class
    monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu", "meta"])
    hold(job("bert"), "bf16 + first_layers(1)", loop)


# ---- between no layer and every layer --------------------------------------------------------------------


def deep(family: str) -> Job:
    """Return a job with a large batch, so that activations outweigh all other memory."""
    return small_job(family, LAYERS, batch_size=64, sequence_length=256)


def on_a_gpu(this: Job, recipe: str) -> Trace:
    return rehearse(this, Recipe.parse(recipe).setup(), CudaPolicy())


def recomputed(trace: Trace) -> int:
    return sum(kernel.recomputed for kernel in trace.kernels)


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(["llama", "t5", "vit"], 1))
def test_each_further_layer_frees_about_as_much(family: str) -> None:
    this = deep(family)
    recipes = ["keep_all", *(f"first_layers({k})" for k in range(1, LAYERS + 1))]
    traces = [on_a_gpu(this, recipe) for recipe in recipes]
    again = [recomputed(trace) for trace in traces]
    assert again == sorted(set(again))
    needed = [trace.peak().nbytes for trace in traces]
    assert needed == sorted(needed, reverse=True)
    freed = [before - after for before, after in pairwise(needed)]
    some = freed[1:-2]  # before, the first layer's input was not kept; the last layers are next to the head
    assert max(some) < 1.2 * min(some)
    every = on_a_gpu(this, "every_layer")
    assert (again[-1], needed[-1]) == (recomputed(every), every.peak().nbytes)


def test_the_first_layers_leave_less_than_the_last_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass reaches the first layers last, after it has freed the activations of the later
    ones."""
    this = deep("llama")
    first = on_a_gpu(this, "lora + first_layers(3)").peak().nbytes
    whole = CheckpointWish.cut
    monkeypatch.setattr(CheckpointWish, "cut", lambda self, layers: whole(CheckpointWish(), layers)[-3:])
    assert first < on_a_gpu(this, "lora + first_layers(3)").peak().nbytes


def test_as_many_as_there_are_is_said() -> None:
    prediction = predict(small_job("bert", 2), "first_layers(2)", gpu="h200")
    assert any("every layer is recomputed" in line for line in prediction.doubts)


# ---- a plan finds k --------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.stored_rehearsals
def test_a_plan_recomputes_as_few_layers_as_fit() -> None:
    """A batch of one sample has no micro-batches. The memory holds the activations of two of four layers."""
    this = small_job("llama", 4, batch_size=1, sequence_length=8192)
    keep = f"lora(r=4) + bf16 + sdpa + adamw_fused + default + inline + {REST}"

    def needed(recipe: str) -> int:
        footprint = predict(this, f"lora(r=4) + bf16 + adamw_fused + {recipe}", gpu="h200").footprint
        return footprint.reserved_bytes + footprint.context_bytes

    memory = needed("first_layers(2)")
    found = plan(this, gpu="h200", memory_bytes=memory, keep=keep, workers=1)
    assert found.best is not None
    assert found.verified
    recipe = Recipe.parse(found.best.recipe)
    k = recipe[Slot.CHECKPOINTING].k  # type: ignore[attr-defined]
    assert str(recipe[Slot.CHECKPOINTING]) == f"first_layers({k})"
    assert found.best.reserved_bytes + found.best.context_bytes <= memory
    reasons = {reason.slot: reason for reason in found.reasons}
    assert reasons["checkpointing"].against == "keep_all"
    assert (reasons["checkpointing"].needed_bytes or 0) > memory
    assert not any(reason.why_not for reason in found.reasons)
    fewer = str(recipe).replace(f"first_layers({k})", f"first_layers({k - 1})" if k > 1 else "keep_all")
    footprint = predict(this, fewer, gpu="h200").footprint
    assert footprint.reserved_bytes + footprint.context_bytes > memory
    all_layers = predict(this, "lora(r=4) + bf16 + adamw_fused + every_layer", gpu="h200")
    assert all_layers.timing is not None
    assert found.best.step_seconds < all_layers.timing.step_seconds
