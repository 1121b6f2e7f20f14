"""Accumulation in `fit` equals the plain Trainer's bit for bit when the user or the Trainer normalises the
loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fitted import classified, losses_of, model_of, quiet, trainer_of
from small_runs import assert_same_weights
from snugfit import fit
from tiers import slow_but

pytestmark = pytest.mark.whole


def normalised(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    summed = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum")
    return summed / (len(labels) if num_items_in_batch is None else num_items_in_batch)


class GivesOutputs(transformers.Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs["labels"]
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        loss = normalised(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize(
    "how",
    slow_but(
        [
            {"more": {"compute_loss_func": normalised}},
            {"kind": GivesOutputs},
            {"label_smoothing_factor": 0.1},
        ],
        2,
    ),
    ids=["a function", "a subclass", "label smoothing"],
)
def test_two_micro_batches_are_the_trainers(how: dict[str, Any], tmp_path: Path) -> None:
    plain, fitted = (
        trainer_of(
            tmp_path / name, model_of("bert", layers=1), classified(), micro=(2, 2), max_steps=3, **how
        )
        for name in ("plain", "fitted")
    )
    fit(fitted, watch=quiet)
    for trainer in (plain, fitted):
        trainer.train()
    assert losses_of(fitted) == losses_of(plain)
    assert_same_weights(fitted.model, plain.model)
    assert fitted.evaluate(classified(4)) is not None
