"""Activation checkpointing on models that are wrapped, of two layer classes, or with a cache that stays on.

A checkpointed step gives the gradients of the plain one, and its rehearsal computes layers a second time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snugfit.job.config import check_facts
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.step.checkpointing import checkpoint_layers
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import CheckpointWish

WIDE = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 96}
HYBRID = {
    "model_type": "jamba", **WIDE, "num_hidden_layers": 4, "num_key_value_heads": 2, "num_experts": 2,
    "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 4,
}  # fmt: skip
CACHED = [
    {"model_type": "xlm", "emb_dim": 32, "n_layers": 3, "n_heads": 2, "n_words": 96, "n_langs": 1},
    {"model_type": "flaubert", "emb_dim": 32, "n_layers": 3, "n_heads": 2, "n_words": 96, "n_langs": 1},
    {
        "model_type": "gpt_neox_japanese", **WIDE, "num_hidden_layers": 3, "intermediate_multiple_size": 2,
        "max_position_embeddings": 64,
    },
    {
        "model_type": "cpmant", "vocab_size": 96, "hidden_size": 32, "num_attention_heads": 2, "dim_head": 16,
        "dim_ff": 64, "num_hidden_layers": 3, "prompt_types": 8, "prompt_length": 4,
    },
]  # fmt: skip


class Wrapped(nn.Module):
    """A head of the user's own on a model of transformers, which alone has the switch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(32, 4)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        states = self.inner(input_ids).last_hidden_state
        return nn.functional.cross_entropy(self.head(states[:, 0]), labels)


def wrapped_bert() -> Wrapped:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {**WIDE, "num_hidden_layers": 4, "max_position_embeddings": 64}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return Wrapped(BertModel(BertConfig(**sizes, **dropout), add_pooling_layer=False))


def gradients(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model.train()
    model.zero_grad()
    out = model(**batch)
    (out if isinstance(out, Tensor) else out.loss).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def recomputes(job: Job, recipe: str) -> bool:
    plain, checkpointed = (
        rehearse(job, Recipe.parse(one).setup(), CudaPolicy()).kernels for one in ("plain", recipe)
    )
    return len(checkpointed) > len(plain) and any(kernel.recomputed for kernel in checkpointed)


EXAMPLE = {"input_ids": torch.arange(32).view(4, 8), "labels": torch.tensor([0, 1, 2, 3])}


@pytest.mark.parametrize(
    ("wish", "expected"),
    [(CheckpointWish(), [True] * 4), (CheckpointWish(every=2), [True, False, True, False])],
)
def test_layers_inside_a_module_of_the_users_own_are_checkpointed(
    wish: CheckpointWish, expected: list[bool]
) -> None:
    model = wrapped_bert()
    plain = gradients(model, EXAMPLE)
    checkpoint_layers(model, wish)
    assert [layer.gradient_checkpointing for layer in model.inner.encoder.layer] == expected
    torch.testing.assert_close(gradients(model, EXAMPLE), plain)


def test_two_wrapped_models_are_switched_each() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = wrapped_bert(), wrapped_bert()

    model = Two()
    checkpoint_layers(model, CheckpointWish())
    layers = [*model.a.inner.encoder.layer, *model.b.inner.encoder.layer]
    assert all(layer.gradient_checkpointing for layer in layers)


@pytest.mark.parametrize("recipe", ["every_layer", "every_nth_layer(2)"])
def test_a_wrapped_model_is_predicted(recipe: str) -> None:
    model = Model.from_module(wrapped_bert(), {**EXAMPLE, "input_ids": torch.ones(4, 64, dtype=torch.long)})
    job = Job(model=model, task=Task.CUSTOM)
    assert recomputes(job, recipe)


def of_family(facts: dict[str, Any]) -> Job:
    checked = check_facts(facts, where=facts["model_type"])
    model = Model.from_config(checked, name=facts["model_type"])
    possible = Task.MASKED_LM if facts["model_type"] in ("xlm", "flaubert") else Task.CAUSAL_LM
    return Job(model=model, task=possible, sequence_length=24)


@pytest.mark.parametrize("facts", [HYBRID, *CACHED], ids=lambda facts: facts["model_type"])
def test_stacks_of_two_classes_and_models_whose_cache_stays_on_are_checkpointed(
    facts: dict[str, Any],
) -> None:
    job = of_family(facts)
    assert recomputes(job, "every_layer")
    from snugfit.job.batch import synthetic
    from snugfit.job.build import instantiate

    torch.manual_seed(0)
    model = instantiate(job, dtype="float32", attention="sdpa")
    for module in model.modules():
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    batch = synthetic(job, 2)
    plain = gradients(model, batch)
    checkpoint_layers(model, CheckpointWish())
    torch.testing.assert_close(gradients(model, batch), plain)
