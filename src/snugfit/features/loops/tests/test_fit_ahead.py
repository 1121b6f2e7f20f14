"""A Trainer under `fit` loads the next batch before this step's update, and loads the same batches as the
plain Trainer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fitted import classified, losses_of, model_of, quiet, trainer_of
from small_runs import assert_same_weights, events
from snugfit import fit

pytestmark = pytest.mark.whole


class Asked(list[dict[str, Any]]):
    """A dataset that records each index that is read, and raises an error at one of them."""

    def __init__(self, broken: int | None = None) -> None:
        super().__init__(classified(22))
        self.asked: list[int] = []
        self.broken = broken

    def __getitem__(self, index: Any) -> Any:
        if index == self.broken:
            raise ValueError("this sample cannot be read")
        self.asked.append(index)
        return super().__getitem__(index)


class AtUpdates(transformers.TrainerCallback):
    """Records the number of samples that were read before each optimizer update."""

    def __init__(self, data: Asked) -> None:
        self.data, self.seen = data, list[int]()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.seen.append(len(self.data.asked))


def trained(folder: Path, recipe: str | None, data: Asked, **more: Any) -> tuple[Any, AtUpdates]:
    """Train with six samples per step, and four in an epoch's last step; return the trainer and record."""
    trainer, updates = trainer_of(folder, model_of("bert"), data, micro=(6, 1), **more), AtUpdates(data)
    trainer.add_callback(updates)
    if recipe is not None:
        fit(trainer, recipe, watch=quiet)
        data.asked.clear()
    trainer.train()
    return trainer, updates


@pytest.mark.parametrize("recipe", ["plain", "micro_batches(2)"])
def test_it_asks_for_what_the_trainer_asks_for_and_earlier(recipe: str, tmp_path: Path) -> None:
    """The run has epochs of four steps and ends in the second epoch."""
    micro, most = (6, 1) if recipe == "plain" else (3, 2), 6
    data = Asked()
    alone = trainer_of(tmp_path, model_of("bert"), data, micro=micro, max_steps=most)
    updates = AtUpdates(data)
    alone.add_callback(updates)
    alone.train()
    fitted, ours = trained(tmp_path, recipe, Asked(), max_steps=most)
    assert fitted.train_dataset.asked == data.asked
    assert all(ours.seen[step] > updates.seen[step] for step in (0, 1))
    assert ours.seen[3] == updates.seen[3]  # an epoch's last step: the next order is not drawn yet
    assert ours.seen[5] == updates.seen[5]  # the run's last step


def test_what_breaks_ahead_is_told_when_it_is_asked_for(tmp_path: Path) -> None:
    """The Trainer's loader is one batch ahead, so the third step reads the fourth batch."""
    data = Asked()
    trainer = trainer_of(tmp_path, model_of("bert"), data, micro=(4, 1), max_steps=5)
    fit(trainer, "plain", watch=quiet)
    data.broken = 13
    with pytest.raises(ValueError, match="cannot be read"):
        trainer.train()
    assert trainer.state.global_step == 2


class Passing(torch.utils.data.IterableDataset[Any]):
    """A stream of this many samples."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(classified(self.count))


def test_what_an_epochs_end_leaves_without_an_update_is_left_out(tmp_path: Path) -> None:
    """22 samples are five batches of two micro-batches, and half a batch."""
    found, told = [], list[str]()
    for count in (20, 22):
        trainer = trainer_of(tmp_path, model_of("bert"), Passing(count), micro=(4, 1), max_steps=7)
        fit(trainer, "micro_batches(2)", watch=lambda event: told.append(event.get("text", ""))).train()
        found.append(trainer)
    assert_same_weights(found[0].model, found[1].model)
    assert losses_of(found[0]) == losses_of(found[1])
    steps = [event["step"] for event in events(tmp_path, "step")]
    assert steps == [1, 2, 3, 4, 5, 6, 7] * 2
    assert len([text for text in told if "last 1 of 2 micro-batches are left out" in text]) == 1
