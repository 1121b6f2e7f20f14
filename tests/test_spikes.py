"""A jump of the loss is reported, stops the run before the update, or is skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from small_runs import assert_same_weights, events, killed_in, losses, small_run
from snugfit.errors import SnugfitError, UsageError
from snugfit.training.run.loop import TrainingStep
from snugfit.training.run.train import train

pytestmark = pytest.mark.whole

JUMPS = 13
RUN: dict[str, Any] = {"max_steps": 16}


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply the model's loss by ten in step 13."""
    plain = TrainingStep.take

    def take(self: TrainingStep, running: Any, *more: Any) -> Any:
        if running.progress.step != JUMPS - 1:
            return plain(self, running, *more)
        handle = running.model.register_forward_hook(jumped)
        try:
            return plain(self, running, *more)
        finally:
            handle.remove()

    monkeypatch.setattr(TrainingStep, "take", take)


def jumped(module: Any, given: Any, out: Any) -> Any:
    out.loss = out.loss * 10
    return out


def warnings(folder: Path) -> list[str]:
    return [event["text"] for event in events(folder, "warning")]


@pytest.mark.usefixtures("jumping")
def test_it_is_told(tmp_path: Path) -> None:
    done = train(small_run(tmp_path, **RUN))
    assert done.step == 16
    (told,) = warnings(tmp_path)
    assert told.startswith("Step 13: The loss is ")
    assert "after 10 with a mean of 0." in told


def test_it_stops_before_the_update(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    whole = train(small_run(tmp_path / "whole", **RUN))
    request.getfixturevalue("jumping")
    with pytest.raises(SnugfitError, match=r"Step 13: The loss is .*No weight was changed.*on_loss_spike="):
        train(small_run(tmp_path / "run", on_loss_spike="stop", **RUN))
    written = json.loads((tmp_path / "run" / "spike-step-13.json").read_text())
    assert sum(len(piece) for piece in written["samples"]) == 4
    request.getfixturevalue("monkeypatch").undo()
    resumed = train(small_run(tmp_path / "run", on_loss_spike="stop", **RUN))
    assert events(tmp_path / "run", "started")[1]["resumed_from"] == 12
    assert_same_weights(resumed.model, whole.model)


@pytest.mark.usefixtures("jumping")
def test_it_is_left_out_also_after_a_resume(tmp_path: Path) -> None:
    """The losses behind the running mean are saved with the run."""
    options = {**RUN, "on_loss_spike": "skip", "save_steps": 4}
    whole = train(small_run(tmp_path / "whole", **options))
    left_out = [event["step"] for event in events(tmp_path / "whole", "step") if not event["updated"]]
    assert left_out == [JUMPS]
    killed_in(small_run(tmp_path / "run", **options), 12)
    resumed = train(small_run(tmp_path / "run", **options))
    assert_same_weights(resumed.model, whole.model)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.usefixtures("jumping")
def test_who_does_not_want_it_is_not_told(tmp_path: Path) -> None:
    train(small_run(tmp_path, loss_spike_rtol=None, **RUN))
    assert not warnings(tmp_path)


def test_many_jumps_are_told_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter([1.0] * 12 + [9.0, 1.0] * 10)
    monkeypatch.setattr("snugfit.training.run.loop.FiniteCheck.loss", lambda self: next(given))
    train(small_run(tmp_path, max_steps=24))
    told = warnings(tmp_path)
    assert len(told) == 3
    assert told[-1].endswith("Further steps like this are not reported.")


@pytest.mark.parametrize(
    ("option", "value"), [("on_loss_spike", "halt"), ("loss_spike_rtol", 0), ("loss_spike_rtol", "2")]
)
def test_mistakes_are_told(tmp_path: Path, option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=option):
        small_run(tmp_path, **{option: value})
