"""Changes of the trained weights during a run: a resumed run continues with the changed set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader

from fitted import classified, losses_of, model_of, padded, quiet, trainer_of
from small_runs import Killed, assert_same_weights
from snugfit import accelerate, fit
from tiers import slow_but

pytestmark = pytest.mark.whole


def train_encoder(model: Any, trains: bool) -> None:
    model.bert.encoder.requires_grad_(trains)


class Unfreezing(transformers.TrainerCallback):
    """A callback that starts with a frozen encoder. Later the encoder trains and the embeddings freeze, by
    steps or by epochs."""

    def __init__(self, by: str, dies_after: int) -> None:
        self.by, self.dies_after = by, dies_after

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        train_encoder(more["model"], False)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.by == "epoch":
            more["model"].bert.embeddings.requires_grad_(round(state.epoch) == 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.by == "step" and state.global_step in (2, 4):
            train_encoder(more["model"], True)
            more["model"].bert.embeddings.requires_grad_(state.global_step == 2)
        if state.global_step == self.dies_after:
            raise Killed


@pytest.mark.parametrize(("by", "dies_after"), slow_but([("step", 4), ("epoch", 6), ("step", 6)], 1))
def test_fit_goes_on_with_what_trained(by: str, dies_after: int, tmp_path: Path) -> None:
    """Checkpoints are at steps 3, 5 and 6, and step 6 is the border of an epoch."""

    def made(folder: Path, dies_after: int = 0) -> Any:
        data = classified(20 if by == "step" else 12)
        more: dict[str, Any] = {
            "max_steps": 8,
            "save_strategy": "steps",
            "save_steps": 1 if dies_after else 8,
        }
        trainer = trainer_of(folder, model_of("bert"), data, **more)
        trainer.add_callback(Unfreezing(by, dies_after))
        return fit(trainer, "plain", watch=quiet)

    whole = made(tmp_path / "whole")
    whole.train()
    with pytest.raises(Killed):
        made(tmp_path / "cut", dies_after).train()
    resumed = made(tmp_path / "cut")
    resumed.train(resume_from_checkpoint=True)
    assert losses_of(resumed) == losses_of(whole)
    assert_same_weights(resumed.model, whole.model)
    assert not any(type(one).__name__ == "RestoreFrozen" for one in resumed.callback_handler.callbacks)


def test_accelerate_goes_on_with_what_trained(tmp_path: Path) -> None:
    def trained(folder: Path, *, stop: int = 0) -> Any:
        model = model_of("bert").train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train_encoder(model, False)
        loader: Any = DataLoader(classified(24), batch_size=4, collate_fn=padded)
        with accelerate(model, optimizer, loader, "plain", output_dir=folder, watch=quiet) as run:
            run.resume()
            for _ in run.epochs(1):
                for batch in run:
                    run.step(batch)
                    if run.steps == 2:
                        train_encoder(model, True)
                    if run.steps == stop:
                        run.save()
                        return model
        return model

    whole = trained(tmp_path / "whole")
    trained(tmp_path / "cut", stop=4)
    assert_same_weights(trained(tmp_path / "cut"), whole)
