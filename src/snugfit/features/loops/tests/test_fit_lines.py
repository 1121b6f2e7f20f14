"""The journal of a fitted trainer: its steps, their predicted values, and the Trainer's own trackers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import transformers

from fitted import classified, killed, losses_of, model_of, quiet, trained, trainer_of
from small_runs import Killed, events, small_run
from snugfit import fit
from snugfit.features.loops.trainer import step_timer
from snugfit.training.predicted import PredictedRun
from snugfit.training.run.train import train
from tensorboards import logs_under, scalars_in

pytestmark = pytest.mark.whole


def run_of(folder: Path, recipe: str = "micro_batches(2)", **more: Any) -> Any:
    data = classified(22)
    return fit(trainer_of(folder, model_of("bert"), data, micro=(8, 1), **more), recipe, watch=quiet)


def test_each_step_has_its_line(tmp_path: Path) -> None:
    """The fourth step begins the second epoch, and the third step has six samples."""
    trainer = trained(run_of(tmp_path, weight_decay=0.1, logging_steps=1))
    told = events(tmp_path, "step")
    assert [event["step"] for event in told] == [1, 2, 3, 4]
    assert [event["loss"] for event in told] == pytest.approx(losses_of(trainer), rel=1e-6)
    log = [line for line in trainer.state.log_history if "loss" in line]
    for event, line in zip(told, log, strict=True):
        assert event["norm"] == pytest.approx(line["grad_norm"], rel=1e-6)
        assert event["learning_rate"] == line["learning_rate"]
        assert event["epoch"] == pytest.approx(line["epoch"], abs=1e-3)
        assert 0 <= event["stall_seconds"] < event["seconds"]
    assert [event["samples"] for event in told] == [8, 8, 6, 8]
    assert told[0]["tokens"] == sum(len(each["input_ids"]) for each in classified(22)[:8])
    (ended,) = events(tmp_path, "ended")
    assert (ended["outcome"], ended["step"]) == ("finished", 4)
    assert math.isfinite(ended["step_seconds"])


def test_lines_are_those_of_the_own_loop(tmp_path: Path) -> None:
    run_of(tmp_path / "fitted", max_steps=1).train()
    train(small_run(tmp_path / "own", max_steps=1))
    for kind in ("step", "ended"):
        ours, theirs = (events(tmp_path / name, kind)[0].keys() for name in ("fitted", "own"))
        assert ours | {"step_seconds"} == theirs | {"step_seconds"}


def test_a_resumed_run_goes_on_in_the_same_journal(tmp_path: Path) -> None:
    class Dies(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 3:
                raise Killed

    more = {"save_strategy": "steps", "save_steps": 2}
    trainer = run_of(tmp_path, **more)
    trainer.add_callback(Dies())
    killed(trainer)
    run_of(tmp_path, **more).train(resume_from_checkpoint=True)
    assert [event["step"] for event in events(tmp_path, "step")] == [1, 2, 3, 4]


def test_what_was_predicted_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = PredictedRun(reserved_bytes=1, step_seconds=100.0, peak_seconds=0.04, samples=8, tokens=80)
    monkeypatch.setattr(step_timer, "run_predictor", lambda device: lambda job, recipe: expected)
    run_of(tmp_path).train()
    (told,) = events(tmp_path, "foreseen")
    assert (told["recipe"], told["step_seconds"]) == ("micro_batches(2)", 100.0)
    for event in events(tmp_path, "step"):
        assert event["mfu"] == pytest.approx(0.04 * event["tokens"] / 80 / event["seconds"])
    (ended,) = events(tmp_path, "ended")
    assert "a step: 100.00 s predicted" in ended["text"]
    assert "differ by more than a fifth" in ended["text"]


def test_nothing_is_foreseen_of_an_optimizer_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(step_timer, "run_predictor", lambda device: pytest.fail)
    model = model_of("bert")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = trainer_of(tmp_path, model, classified(), more={"optimizers": (optimizer, None)})
    fit(trainer, "plain", watch=quiet).train()
    assert not events(tmp_path, "foreseen")


def test_the_trainers_own_trackers_hear_it(tmp_path: Path) -> None:
    run_of(tmp_path, report_to="tensorboard", logging_steps=2).train()
    (log,) = logs_under(tmp_path)
    told = [event["loss"] for event in events(tmp_path, "step")]
    means = [(2, sum(told[:2]) / 2), (4, sum(told[2:]) / 2)]
    assert scalars_in(log)["train/loss"] == [(step, pytest.approx(mean, rel=1e-5)) for step, mean in means]
