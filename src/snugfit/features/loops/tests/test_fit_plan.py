"""Without a recipe, `fit` plans for a GPU from a copy of the model on `meta`, and keeps the user's
choices.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import snugfit.job.gpu as gpus
from fitted import classified, model_of, quiet, spoken, trainer_of
from snugfit import fit
from snugfit.errors import NothingFits
from snugfit.features.loops.trainer.job import job_of
from snugfit.prediction.predict import predict
from tiers import slow_but


class Deep(nn.Module):
    """A user's model with tied weights, a hook and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(96, 32), nn.Linear(32, 96, bias=False)
        self.head.weight = self.table.weight
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
        self.layers[0].requires_grad_(False)
        self.layers[1].register_forward_hook(lambda module, given, out: out * 2)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> dict[str, Any]:
        hidden = self.table(input_ids)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        return {"loss": loss}


def bytes_of(trainer: Any, recipe: str) -> tuple[int, int]:
    seen = predict(job_of(trainer), recipe, gpu="h200").footprint
    return seen.requested_bytes, seen.reserved_bytes


@pytest.mark.whole
def test_a_plan_is_made_and_applied(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Deep(), spoken(), micro=(1, 2), optim="sgd", dataloader_num_workers=1)
    told: list[str] = []
    before = torch.get_rng_state()
    fit(trainer, gpu="h200", watch=lambda event: told.append(event["text"]) if "text" in event else None)
    assert torch.equal(before, torch.get_rng_state())
    recipe = str(trainer.snugfit.recipe)
    assert "planned for a h200" in told[0]
    assert "sgd" in recipe, "a plan never changes the algorithm"
    assert "micro_batches" not in recipe, "accumulation only costs time if the batch fits"
    args = trainer.args
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (2, 1)
    assert args.dataloader_num_workers == 1
    args.dataloader_num_workers = 0
    trainer.train()


@pytest.mark.whole
def test_nothing_that_fits_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tmp_path, Deep(), spoken(), micro=(1, 1))
    small = replace(gpus.find_gpu("h200"), memory_bytes=1 << 20)
    monkeypatch.setattr(gpus, "find_gpu", lambda name: small)
    with pytest.raises(NothingFits, match="The nearest is"):
        fit(trainer, gpu="h200", watch=quiet)
    assert "snugfit" not in vars(trainer)


@pytest.mark.whole
def test_without_a_gpu_the_trainer_keeps_what_it_asks_for(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model_of("bert"), classified(), micro=(2, 2), bf16=True, optim="adafactor")
    told: list[str] = []
    fit(trainer, watch=lambda event: told.append(event["text"]) if "text" in event else None)
    assert len(told) == 1
    assert "keeps its own settings, 'bf16 + micro_batches(2)" in told[0]
    trainer.train()
    assert type(trainer.optimizer.optimizer).__name__ == "Adafactor"


@pytest.mark.whole
@pytest.mark.parametrize("recipe", slow_but(["bf16", "plain"], 1))
def test_a_trained_model_is_rehearsed_as_a_fresh_one(recipe: str, tmp_path: Path) -> None:
    def made() -> Any:
        return trainer_of(tmp_path, model_of("bert", dropout=0.1), classified(), bf16=recipe == "bf16")

    fresh, used = made(), made()
    used.train()
    expected = bytes_of(fresh, recipe)
    assert bytes_of(used, recipe) == expected
    refitted = fit(used, f"{recipe} + segments" if recipe != "plain" else "segments", watch=quiet)
    assert bytes_of(refitted, recipe) == expected, "wrappers of an earlier fit are no part of the model"


def test_the_copy_holds_no_data_and_is_like_the_model(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Deep(), spoken())
    copy, model = job_of(trainer).model.module, trainer.model
    assert copy.head.weight is copy.table.weight
    assert all(each.is_meta for each in copy.parameters())
    assert [each.requires_grad for each in copy.parameters()] == [
        each.requires_grad for each in model.parameters()
    ]
    assert len(copy.layers[1]._forward_hooks) == 1
    assert not any(each.is_meta for each in model.parameters())


def test_a_forward_that_a_library_has_replaced_runs_on_the_copy(tmp_path: Path) -> None:
    """TRL's fused loss replaces the forward by a function that holds the model's own method."""
    trainer = trainer_of(tmp_path, Deep(), spoken())
    expected = bytes_of(trainer, "plain")
    original = trainer.model.forward

    def replaced(self: Any, input_ids: Any, attention_mask: Any = None, **more: Any) -> Any:
        return original(input_ids, attention_mask, **more)

    trainer.model.forward = MethodType(replaced, trainer.model)
    assert bytes_of(trainer, "plain") == expected


@pytest.mark.whole
def test_an_optimizer_that_nobody_named_stays_the_trainer_s(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Deep(), spoken(), micro=(1, 1))
    told: list[str] = []
    fit(trainer, gpu="h200", watch=lambda event: told.append(event["text"]) if "text" in event else None)
    assert trainer.args.optim == "adamw_torch_fused"
    assert trainer.snugfit.recipe["optimizer"].name == "adamw_fused"
    assert "The optimizer stays the Trainer's default" in told[0]
