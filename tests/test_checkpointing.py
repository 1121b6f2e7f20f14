"""Activation checkpointing on wrapped models, on two layer classes, and with a cache that stays on.

A checkpointed step gives the gradients of the plain one, and its rehearsal computes layers a second time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fitted import classified, model_of, padded, quiet, spoken, trainer_of
from kept import kept
from snugfit import accelerate, fit
from snugfit.errors import RecipeError
from snugfit.job.config import check_facts
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.job.own_checkpointing import NAMES
from snugfit.planning.keep import kept_of
from snugfit.planning.search.space import space_of
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.step.checkpointing import checkpoint_layers
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import CheckpointWish
from tiers import slow_but

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
    """The user's own head on a model of transformers; only the inner model has the switch."""

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
    [
        (CheckpointWish(), [True] * 4),
        (CheckpointWish(every=2), [True, False, True, False]),
        (CheckpointWish(first=3), [True, True, True, False]),
    ],
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


@pytest.mark.parametrize("recipe", slow_but(["every_layer", "every_nth_layer(2)"], 1))
def test_a_wrapped_model_is_predicted(recipe: str) -> None:
    model = Model.from_module(wrapped_bert(), {**EXAMPLE, "input_ids": torch.ones(4, 64, dtype=torch.long)})
    job = Job(model=model, task=Task.CUSTOM)
    assert recomputes(job, recipe)


def of_family(facts: dict[str, Any]) -> Job:
    checked = check_facts(facts, where=facts["model_type"])
    model = Model.from_config(checked, name=facts["model_type"])
    possible = Task.MASKED_LM if facts["model_type"] in ("xlm", "flaubert") else Task.CAUSAL_LM
    return Job(model=model, task=possible, sequence_length=24)


@pytest.mark.parametrize("facts", slow_but([HYBRID, *CACHED], 2), ids=lambda facts: facts["model_type"])
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


# ---- adapters that pass a cache to the layers ------------------------------------------------------------

RECOMPUTING = ("every_layer", "every_nth_layer", "first_layers(1)", "segments(2)", "selective(products)")
DROPPED = "(?s)PREFIX_TUNING.*would be lost.*keep_all"


def with_prefix(family: str = "llama", task: str = "CAUSAL_LM") -> Any:
    import peft

    config = peft.PrefixTuningConfig(num_virtual_tokens=3, task_type=task)
    return peft.get_peft_model(model_of(family), config, adapter_name="mine")


def prefix_job() -> Job:
    example = padded(spoken(4))
    return Job(model=Model.from_module(with_prefix(), example), task=Task.CUSTOM, batch_size=4)


@pytest.mark.parametrize("recipe", RECOMPUTING)
def test_a_prefix_that_recomputed_layers_would_drop_is_refused(recipe: str) -> None:
    """transformers passes no cache to checkpointed layers, so the model would train without its prefix."""
    with pytest.raises(RecipeError, match=DROPPED):
        predict(prefix_job(), recipe, gpu="h200")


def test_a_plan_leaves_out_what_drops_a_prefix_and_says_why() -> None:
    job = prefix_job()
    space = space_of(job, fixed=kept_of(job, kept(but="checkpointing")))
    assert not any(candidate.setup.checkpoint for candidate in space.candidates)
    assert any("PREFIX_TUNING" in one.why for one in space.excluded if one.what == "every_layer")


def test_the_front_ends_refuse_to_drop_a_prefix(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, with_prefix(), spoken())
    with pytest.raises(RecipeError, match=DROPPED):
        fit(trainer, "every_layer", watch=quiet)
    name = next(name for name in NAMES if hasattr(trainer.args, name))
    for more in {}, {f"{name}_kwargs": {"offload": True}}:
        asked_for = trainer_of(tmp_path, with_prefix(), spoken(), **{name: True, **more})
        with pytest.raises(RecipeError, match=DROPPED):
            fit(asked_for, watch=quiet)
    model = with_prefix()
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    loader = torch.utils.data.DataLoader(spoken(), batch_size=4, collate_fn=padded)
    with pytest.raises(RecipeError, match=DROPPED):
        accelerate(model, optimizer, loader, "segments(2)", watch=quiet)


@pytest.mark.whole
def test_a_model_with_a_prefix_is_planned(tmp_path: Path) -> None:
    """With an adapter under its own name, gradients accumulated in bf16, and the user's optimizer."""
    model = with_prefix("bert", "SEQ_CLS")
    optimizer = torch.optim.Adagrad([weight for weight in model.parameters() if weight.requires_grad])
    trainer = trainer_of(
        tmp_path, model, classified(), micro=(2, 2), bf16=True, more={"optimizers": (optimizer, None)}
    )
    fit(trainer, gpu="h200", watch=quiet)
    assert "bf16" in str(trainer.snugfit.recipe)
