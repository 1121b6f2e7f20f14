"""Selective checkpointing.

Its gradients equal those of `keep_all` bit for bit, and a layer recomputes less. Other tests cover the
effects of its dispatch mode on the device and its cost on the host.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snugfit.errors import RecipeError, RehearsalError
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.prediction.rates import rates_for
from snugfit.prediction.seconds import step_seconds
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Trace
from snugfit.step.build import build_model
from snugfit.step.checkpointing import checkpoint_layers
from snugfit.step.selective import KEPT_OPERATORS
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import CheckpointWish
from test_law_loops import hold
from test_law_rehearsed_equals_real import hold_to_reports, job
from tiers import crossed

CPU = torch.device("cpu")


def gradients(family: str, recipe: str, *, autocast: bool) -> dict[str, Tensor]:
    """Return the gradients of a model with dropout and padding, from one seed."""
    this = job(family)
    torch.manual_seed(0)
    model = build_model(this, Recipe.parse(recipe).setup(), CPU).train()
    ids = torch.arange(4 * 16).view(4, 16) % 96
    mask = torch.ones_like(ids)
    mask[1, 10:] = 0
    labels = torch.arange(4) % 2 if this.task is Task.SEQUENCE_CLASSIFICATION else ids
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
    loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize(
    ("what", "family", "attention", "autocast"),
    crossed(
        KEPT_OPERATORS,
        [("bert", "sdpa", True), ("gpt2", "eager", False), ("llama", "sdpa", True), ("llama", "sdpa", False)],
    ),
)
def test_gradients_are_those_of_keep_all_bit_for_bit(
    family: str, attention: str, autocast: bool, what: str
) -> None:
    plain = gradients(family, attention, autocast=autocast)
    kept = gradients(family, f"{attention} + selective({what})", autocast=autocast)
    assert plain
    assert plain.keys() == kept.keys()
    assert all(torch.equal(plain[name], kept[name]) for name in plain)


def test_a_users_own_layers_keep_their_products() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm, self.drop = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.drop(torch.relu(self.inner(self.norm(x))))
            return out

    def step(wish: CheckpointWish | None) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*[Layer() for _ in range(3)])
        if wish is not None:
            checkpoint_layers(model, wish)
        model(torch.ones(2, 8)).sum().backward()
        return [weight.grad for weight in model.parameters()]

    pairs = zip(step(None), step(CheckpointWish(keep="products")), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("gpt2", "selective(products)"),
        ("t5", "bf16 + selective(attention)"),
        ("llama", "lora + bf16_pure + selective(every_other_product) + micro_batches(2)"),
    ],
)
def test_a_real_step_allocates_what_its_trace_says(family: str, recipe: str) -> None:
    """Under the layers' dispatch mode, torch adds a mask to attention's scores out of place."""
    hold_to_reports(job(family), Recipe.parse(recipe))


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize("loop", ["accelerate", "trainer"])
def test_other_loops_keep_the_same(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("torch.optim.optimizer")  # torch.optim hides it under its class
    monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu", "meta"])
    hold(job("bert"), "bf16 + selective(products)", loop)


# ---- tensors kept on a GPU -------------------------------------------------------------------------------


def on_a_gpu(this: Job, recipe: str) -> Trace:
    return rehearse(this, Recipe.parse(recipe).setup(), CudaPolicy())


def without_dropout(family: str) -> Job:
    this = job(family)
    config = this.model.config | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return replace(this, model=Model.from_config(config, name=family))


def recomputed(trace: Trace, word: str) -> int:
    return sum(kernel.recomputed and word in kernel.operator for kernel in trace.kernels)


def test_attention_and_products_are_not_computed_again() -> None:
    this = without_dropout("bert")
    whole, attention, products = (
        on_a_gpu(this, f"bf16 + {name}")
        for name in ("every_layer", "selective(attention)", "selective(products)")
    )
    assert [recomputed(trace, "attention") for trace in (whole, attention, products)] == [2, 0, 0]
    assert recomputed(whole, "addmm") == recomputed(attention, "addmm") > recomputed(products, "addmm")
    assert recomputed(products, "addmm") == 0
    other = on_a_gpu(this, "bf16 + selective(every_other_product)")
    assert recomputed(products, "addmm") < recomputed(other, "addmm") < recomputed(attention, "addmm")


def test_attention_with_dropout_is_computed_again() -> None:
    """Dropout draws random numbers. A stored output would shift the numbers of every later dropout."""
    assert recomputed(on_a_gpu(job("bert"), "bf16 + selective(products)"), "attention") == 2


def test_the_host_pays_for_each_operator() -> None:
    this, gpu = job("bert"), find_gpu("h200")
    whole, selective = on_a_gpu(this, "every_layer"), on_a_gpu(this, "selective(attention)")
    assert not any(kernel.intercepted for kernel in whole.kernels)
    looked_at = sum(kernel.intercepted for kernel in selective.kernels)
    assert looked_at > 2 * len([kernel for kernel in selective.kernels if kernel.recomputed])
    rates = rates_for(gpu)
    free = replace(rates, host=replace(rates.host, intercepted=0.0))
    costs = [step_seconds(selective, gpu, batch_size=4, rates=one).host_seconds for one in (rates, free)]
    assert costs[0] - costs[1] == pytest.approx(looked_at * rates.host.intercepted)


def test_a_layer_that_writes_into_what_is_kept_is_refused() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = torch.relu(self.inner(x).add_(1.0))
            return out

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(Layer(), Layer())

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layers(x).pow(2).sum()
            return out

    this = Job(model=Model.from_module(Stack(), {"x": torch.ones(4, 8)}), task=Task.CUSTOM)
    with pytest.raises(RehearsalError, match=r"writes in place .* 'every_layer'"):
        on_a_gpu(this, "selective(products)")


def test_attention_that_cannot_be_kept_is_not_planned() -> None:
    """GPT-2's attention has dropout, which raises a warning about the recipe.

    BERT's attention is planned only with `fused + captured`. Eager attention is no single operator. A
    short sequence excludes the technique without an import of transformers.
    """
    kind = roster.find("selective")
    long_gpt2, long_bert = (
        replace(job(family), sequence_length=job(family).transformers_config().hidden_size)
        for family in ("gpt2", "bert")
    )
    assert "dropout" in kind.planning_objection(long_gpt2)
    assert not kind.planning_objection(long_bert)
    (of_bert,) = kind.settings(long_bert)
    assert str(of_bert) == "selective(attention)"
    for recipe, is_planned in (("fused + captured", True), ("fused", False), ("captured", False)):
        assert (of_bert.planned_without(long_bert, Recipe.parse(recipe)) == "") == is_planned, recipe
    assert not of_bert.planned_without(replace(job("llama"), sequence_length=64), Recipe())
    assert "less than a seventh" in kind.planning_objection(job("bert"))
    width = job("llama").transformers_config().hidden_size
    long, short = (replace(job("llama"), sequence_length=length) for length in (width, width - 1))
    assert "less than a seventh" in kind.planning_objection(short)
    assert not kind.planning_objection(long)
    assert [str(one) for one in kind.settings(long)] == ["selective(attention)"]
    recipe = Recipe.parse("selective(attention)")
    assert any("attention_probs_dropout_prob=0.1" in one for one in recipe.check(job("bert")))
    with pytest.raises(RecipeError, match="none of which would be kept"):
        Recipe.parse("eager + selective(attention)").check(job("llama"))
