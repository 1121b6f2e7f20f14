"""Micro-batches equal the whole batch for every way in which the HF Trainer computes a loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from fitted import classified, copy_of, losses_of, model_of, quiet, spoken, trainer_of
from snugfit import fit
from snugfit.job.batch import IGNORED

pytestmark = pytest.mark.whole

CUT = "micro_batches(4)"


def summed(outputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross-entropy over counted labels, and their number."""
    logits = outputs["logits"]
    if labels.dim() > 1:
        logits, labels = logits[:, :-1], labels[:, 1:]
    loss = nn.functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return loss, labels.ne(IGNORED).sum()


class Divides(transformers.Trainer):
    """A Trainer whose loss divides by the number of items, as in transformers' documentation."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss, items = summed(outputs, labels)
        loss = loss / (items if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class Averages(Divides):
    """A Trainer whose loss accepts the number of items and ignores it, as in most user code."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return super().compute_loss(model, inputs, return_outputs)


class Passes(transformers.Trainer):
    """A Trainer that passes all arguments on to transformers' own loss."""

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        return super().compute_loss(model, inputs, *arguments, **keywords)


def divided(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    loss, items = summed(outputs, labels)
    return loss / (items if num_items_in_batch is None else num_items_in_batch)


def averaged(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return divided(outputs, labels)


class NoKeywords(nn.Module):
    """A user's model without `**kwargs`; its loss is a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(96, 16), nn.Linear(16, 2)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> dict[str, Any]:
        logits = self.head((self.table(input_ids) * attention_mask[..., None]).sum(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "mean per sample, in a model that takes anything": ("bert", {}),
    "mean per token, divided by the model": ("llama", {}),
    "mean per token, in a model that averages by itself": ("gpt2", {}),
    "a model of one's own": ("own", {}),
    "compute_loss that divides": ("llama", {"kind": Divides}),
    "compute_loss that averages tokens": ("llama", {"kind": Averages}),
    "compute_loss that averages samples": ("bert", {"kind": Averages}),
    "compute_loss that passes on, and the model divides": ("llama", {"kind": Passes}),
    "compute_loss that passes on, and the model averages": ("bert", {"kind": Passes}),
    "compute_loss_func that divides": ("llama", {"more": {"compute_loss_func": divided}}),
    "compute_loss_func that averages": ("llama", {"more": {"compute_loss_func": averaged}}),
    "label smoothing": ("llama", {"label_smoothing_factor": 0.1}),
}


def trained(folder: Path, model: Any, recipe: str, how: dict[str, Any], told: list[str]) -> list[float]:
    """Return losses and gradient norms of four steps, the last with an epoch's smaller last batch."""
    data = classified(14) if "Bert" in type(model).__name__ or isinstance(model, NoKeywords) else spoken(14)
    trainer = trainer_of(folder, copy_of(model), data, max_steps=4, lr_scheduler_type="constant", **how)
    fit(trainer, recipe, watch=lambda event: told.append(event.get("text", ""))).train()
    norms = [float(line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line]
    return [*losses_of(trainer), *norms]


@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_are_the_whole_batch(way: str, tmp_path: Path) -> None:
    family, how = WAYS[way]
    torch.manual_seed(0)
    model = NoKeywords() if family == "own" else model_of(family, layers=1)
    whole = trained(tmp_path, model, "plain", how, [])
    assert len(whole) == 8
    assert trained(tmp_path, model, CUT, how, []) == pytest.approx(whole, rel=2e-5)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (
            "mean per sample, in a model that takes anything",
            "BertForSequenceClassification averages over each",
        ),
        pytest.param("mean per token, divided by the model", None, marks=pytest.mark.slow),
        ("a model of one's own", "NoKeywords the same weight"),
        ("compute_loss that averages tokens", "compute_loss averages over each micro-batch"),
        ("compute_loss that divides", None),
        ("compute_loss_func that averages", "compute_loss_func averages over each micro-batch"),
        pytest.param("compute_loss_func that divides", None, marks=pytest.mark.slow),
    ],
)
def test_what_transformers_does_wrong_is_said_once(way: str, words: str | None, tmp_path: Path) -> None:
    family, how = WAYS[way]
    model = NoKeywords() if family == "own" else model_of(family, layers=1)
    told: list[str] = []
    if family == "own":  # micro-batches of unequal size: the epoch's last batch has 4 samples and 2
        how = {**how, "micro": (8, 1)}
    trained(tmp_path, model, "micro_batches(2)", how, told)
    said = [text for text in told if "transformers would" in text]
    if words is None:
        assert not said
    else:
        assert len(said) == 1
        assert words in said[0]


def test_transformers_alone_gets_it_wrong(tmp_path: Path) -> None:
    """transformers still has the fault that fit corrects; without it, fit's correction would be wrong."""
    model = model_of("bert", layers=1)
    trainer = trainer_of(tmp_path, copy_of(model), classified(), micro=(1, 4), max_steps=1)
    trainer.train()
    fitted = fit(
        trainer_of(tmp_path, model, classified(), micro=(1, 4), max_steps=1), "micro_batches(4)", watch=quiet
    )
    fitted.train()
    assert losses_of(trainer)[0] == pytest.approx(4 * losses_of(fitted)[0], rel=1e-5)


def test_a_micro_batch_in_which_nothing_counts_is_left_out(tmp_path: Path) -> None:
    data = spoken(4)
    data[1] = {**data[1], "labels": [IGNORED] * len(data[1]["labels"])}
    model = model_of("llama", layers=1)
    found = []
    for recipe in ("plain", "micro_batches(4)"):
        trainer = trainer_of(tmp_path, copy_of(model), data, max_steps=1)
        fit(trainer, recipe, watch=quiet).train()
        found.append(losses_of(trainer)[0])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_finding_out_changes_no_buffer_and_no_generator(tmp_path: Path) -> None:
    """fit runs a model with dropout and running statistics one time more than training does."""

    class Normalised(NoKeywords):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.calls = nn.BatchNorm1d(16), 0

        def forward(self, input_ids: Any, labels: Any = None, **more: Any) -> dict[str, Any]:
            self.calls += 1
            hidden = nn.functional.dropout(self.norm(self.table(input_ids).sum(1)), 0.5, self.training)
            logits = self.head(hidden)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def run(known: bool) -> tuple[int, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        trainer = trainer_of(tmp_path, Normalised(), classified(), max_steps=2)
        fit(trainer, "micro_batches(2)", watch=quiet)
        if known:
            trainer.snugfit.loss.uses_item_count = False
        trainer.train()
        return trainer.model.calls, trainer.model.state_dict()

    (asked, one), (never, other) = run(known=False), run(known=True)
    assert asked == never + 1
    assert all(torch.equal(value, other[name]) for name, value in one.items())
