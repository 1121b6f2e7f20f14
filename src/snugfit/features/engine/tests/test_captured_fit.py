"""`fit` with `captured`: passes of a Trainer that are replayed, and the code that prevents it.

CUDA graphs need a GPU. Here a replay runs the recorded work again (`run_again.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from run_again import captured_on_cpu

from fitted import losses_of, model_of, padded, quiet, spoken, trainer_of
from small_runs import assert_same_weights
from snugfit import fit
from snugfit.errors import RecipeError
from tiers import slow_but

COUNT, LENGTH = 24, 6


def rows_of_one_length() -> list[dict[str, Any]]:
    """Return samples of one length, with different numbers of labels."""
    rows = []
    for row in spoken(COUNT):
        ids, labels = ([*row[name], *[5] * LENGTH][:LENGTH] for name in ("input_ids", "labels"))
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def without_mask(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return samples as a batch without a mask, whose attention is the same kernel in a replay."""
    return {name: value for name, value in padded(samples).items() if name != "attention_mask"}


def trained(folder: Path, recipe: str, told: list[str] | None = None, **more: Any) -> tuple[Any, list[float]]:
    """Return a trainer after its run, with an evaluation after each step, and its losses."""
    trainer = trainer_of(
        folder, model_of("llama"), rows_of_one_length(), micro=(4, 2), eval_strategy="steps", eval_steps=1,
        more={"eval_dataset": rows_of_one_length()[:4]}, **more,
    )  # fmt: skip
    trainer.data_collator = without_mask
    fit(trainer, recipe, watch=quiet if told is None else lambda event: told.append(event.get("text", "")))
    trainer.train()
    return trainer, losses_of(trainer)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("recipe", "recorded"),
    slow_but(
        [("lora + bf16 + adamw_fused + fused + micro_batches(2)", 1), ("adamw_fused", 1),
         ("bf16_pure + every_layer + micro_batches(4)", 1)],
        1,
    ),
)  # fmt: skip
def test_replayed_passes_are_the_trainers_own(tmp_path: Path, recipe: str, recorded: int) -> None:
    """Losses and weights are equal bit for bit, with micro-batches whose losses count by their labels."""
    plain, expected = trained(tmp_path / "plain", recipe)
    with captured_on_cpu() as graphs:
        replayed, losses = trained(tmp_path / "replayed", f"{recipe} + captured(multiple=1)")
    assert losses == expected
    assert_same_weights(replayed.model, plain.model)
    assert graphs[0].recorded == recorded
    assert graphs[0].played > 2


@pytest.mark.whole
def test_label_smoothing_finds_labels_in_each_replay(tmp_path: Path) -> None:
    """The Trainer removes the labels from a batch that it smooths."""
    _, expected = trained(tmp_path / "plain", "plain", label_smoothing_factor=0.1)
    with captured_on_cpu() as graphs:
        _, losses = trained(tmp_path / "replayed", "captured(multiple=1)", label_smoothing_factor=0.1)
    assert losses == expected
    assert graphs[0].played > 2


@pytest.mark.whole
def test_a_pass_that_cannot_be_recorded_warns_once(tmp_path: Path) -> None:
    _, expected = trained(tmp_path / "plain", "adamw_fused")
    told: list[str] = []
    with captured_on_cpu(1):
        _, losses = trained(tmp_path / "told", "adamw_fused + captured(multiple=1)", told)
    assert losses == expected
    assert sum("Steps run without CUDA graphs: it waits." in text for text in told) == 1


class OwnLoss(transformers.Trainer):  # type: ignore[misc]
    """A user's Trainer with its own loss."""

    def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
        return super().compute_loss(*arguments, **keywords)


def test_code_of_the_user_in_a_pass_is_refused_by_name(tmp_path: Path) -> None:
    model = model_of("llama")
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: None)
    model.lm_head.weight.register_hook(lambda gradient: gradient)
    trainer = trainer_of(tmp_path, model, spoken(), kind=OwnLoss)
    with pytest.raises(RecipeError) as refusal:
        fit(trainer, "captured", watch=quiet)
    for name in (
        "compute_loss of OwnLoss",
        "a hook of model.layers.0",
        "a gradient hook of lm_head.weight",
        "leave captured out",
    ):
        assert name in str(refusal.value)
    assert type(trainer) is OwnLoss, "a refused recipe changes nothing"
