"""The position of a fitted trainer in its data: streams, random samples and loaders resume bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader

from fitted import assert_same_run, killed, log_of, model_of, padded, quiet, trained, trainer_of
from small_runs import assert_same_weights
from small_streams import RESUMABLE, SAMPLES, Drawing, Entropy, Masking, ReadOnce, seed_all
from snugfit import fit
from snugfit.errors import SnugfitError, UsageError
from snugfit.features.loops.loader import DataPosition
from test_fit_keeping import At, die
from tiers import slow_but

pytestmark = pytest.mark.whole


class OwnLoader(transformers.Trainer):  # type: ignore[misc]
    """A trainer whose loader shuffles with its own generator."""

    def get_train_dataloader(self) -> Any:
        """Return torch's loader instead of accelerate's."""
        own = torch.Generator().manual_seed(8)
        size = self.args.per_device_train_batch_size
        return DataLoader(Drawing(), size, shuffle=True, generator=own, collate_fn=padded)


Case = tuple[Callable[[], Any], dict[str, Any]]
WORKERS = {"dataloader_num_workers": 2}
CASES: dict[str, Case] = {
    **{name: (made, {}) for name, made in RESUMABLE.items()},
    "accumulated stream": (RESUMABLE["a stream"], {"micro": (2, 2)}),
    "drawing, workers": (Drawing, WORKERS),
    "drawing, workers that stay": (Drawing, {**WORKERS, "dataloader_persistent_workers": True}),
    "a loader of one's own": (Drawing, {"kind": OwnLoader}),
    "a seeded collator": (lambda: SAMPLES, {"collator": Masking}),
}


def run_of(case: str, folder: Path, *, at: int | None = None, **more: Any) -> Any:
    """Return a fitted trainer with dropout over this data: twelve steps, a checkpoint each, five steps per
    epoch."""
    dataset, arguments = CASES[case]
    wanted: dict[str, Any] = {
        "max_steps": 12, "save_strategy": "steps", "save_steps": 1, "train_sampling_strategy": "random",
        "eval_strategy": "epoch", "seed": 5, **arguments, **more,
    }  # fmt: skip
    collator = wanted.pop("collator", None)
    seed_all(1)
    model = model_of("bert", layers=1, dropout=0.2)
    evaluation = {"eval_dataset": SAMPLES[:4]}
    trainer = trainer_of(folder, model, dataset(), more=evaluation, **wanted)
    if collator is not None:
        trainer.data_collator = collator()
    if at is not None:
        trainer.add_callback(At(at, die))
    return fit(trainer, watch=quiet)


@cache
def whole_of(case: str, folder: Path) -> Any:
    return trained(run_of(case, folder / case, save_strategy="no"))


STOPS = [(case, stop) for case in CASES for stop in (3, 6, 8, 11)]
QUICK = [("accumulated stream", 6)]


@pytest.mark.parametrize(("case", "stop"), slow_but(STOPS, QUICK.__contains__))
def test_the_data_goes_on_where_it_was(
    case: str, stop: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The kills come in the first epoch, between epochs, and in later epochs. The log is also the same."""
    whole = whole_of(case, tmp_path_factory.getbasetemp())
    killed(run_of(case, tmp_path, at=stop))
    resumed = trained(run_of(case, tmp_path), True)
    assert_same_run(resumed, whole)
    assert log_of(resumed) == log_of(whole)


@pytest.mark.parametrize("dataset", [Entropy, ReadOnce])
def test_data_that_cannot_be_made_again_is_refused_at_the_start(dataset: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model_of("bert"), dataset())
    with pytest.raises(UsageError, match=f"The dataset {dataset.__name__} cannot be read again"):
        fit(trainer, watch=quiet)


def test_other_data_is_refused_when_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Detect changed data although the facts compared at the start of a run are the same."""
    monkeypatch.setattr("snugfit.features.loops.trainer.checkpoints.dataset_facts", lambda data: {})
    killed(run_of("drawing", tmp_path, at=4))
    again = run_of("drawing", tmp_path)
    again.train_dataset = SAMPLES[::-1]
    with pytest.raises(SnugfitError, match="another batch 3 than before"):
        again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (None, "has no train_dataset"),
        ([], "is empty"),
        (["a"] * 8, "batch could not be made .TypeError"),
    ],
)
def test_data_that_gives_no_batch_is_refused_in_words(data: Any, told: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model_of("bert"), data)
    with pytest.raises(UsageError, match=told):
        fit(trainer, "plain", watch=quiet)
    with pytest.raises(UsageError, match="watch is 3; it must be a function"):
        fit(trainer_of(tmp_path, model_of("bert"), SAMPLES), "plain", watch=3)  # type: ignore[arg-type]


def test_a_checkpoint_without_its_position_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, plain = "a loader of one's own", DataPosition.to_json

    def without_position(position: DataPosition, rows: int) -> dict[str, Any]:
        return {name: value for name, value in plain(position, rows).items() if name not in ("place", "rows")}

    with monkeypatch.context() as patch:
        patch.setattr(DataPosition, "to_json", without_position)
        killed(run_of(case, tmp_path, at=4))
    with pytest.raises(SnugfitError, match=r"its files are not as snugfit writes them \(KeyError: 'rows'\)"):
        run_of(case, tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(("stop", "every"), slow_but([(6, "steps"), (12, "epoch")], 1))
def test_an_evaluation_draws_the_same_when_it_is_made_again(stop: int, every: str, tmp_path: Path) -> None:
    """A signal ends the evaluation, whose collator draws from its own generator, as in training."""

    class Ends(transformers.TrainerCallback):  # type: ignore[misc]
        def on_prediction_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            """Send a signal at the first batch of an evaluation."""
            if state.global_step == stop:
                os.kill(os.getpid(), signal.SIGTERM)

    def made(folder: Path) -> Any:
        more = {"eval_strategy": every, "eval_steps": 3, "save_steps": 3}
        return run_of("a seeded collator", folder, **more)

    whole = trained(made(tmp_path / "whole"))
    cut = made(tmp_path / "cut")
    cut.add_callback(Ends())
    with pytest.raises(SystemExit):
        cut.train()
    resumed = trained(made(tmp_path / "cut"), True)
    assert log_of(resumed) == log_of(whole)
    assert_same_weights(resumed.model, whole.model)
