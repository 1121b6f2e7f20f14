"""A signal during an evaluation takes effect at the next batch and leaves a checkpoint.

The resumed run repeats the evaluation of that step. Its log and its best model equal those of an
uninterrupted run.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from small_runs import CPU, assert_same_weights, events, losses, small_run
from snugfit.errors import SnugfitError
from snugfit.training.checkpoint import store
from snugfit.training.checkpoint.manager import CheckpointManager
from snugfit.training.checkpoint.manifest import SaveStopped, verify
from snugfit.training.interrupt import Interrupts
from snugfit.training.journal import Journal
from snugfit.training.run.run import Run
from snugfit.training.run.train import train
from tiers import slow_but

pytestmark = pytest.mark.whole


@pytest.fixture(autouse=True)
def hangup_ends_a_process() -> Iterator[None]:
    """Restore the default action of SIGHUP, which `nohup` sets to ignore for a whole test run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def evaluating_run(folder: Path, *, stop_in: int | None = None, **options: Any) -> Run:
    """Return a run of six steps with an evaluation after every second step, in batches of two.

    SIGTERM arrives during the evaluation batch `stop_in`, counted over all evaluations.
    """
    wanted: dict[str, Any] = {
        "max_steps": 6, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2,
        "save_steps": 100, "load_best_model_at_end": True, **options,
    }  # fmt: skip
    run = small_run(folder, **wanted)
    assert run.evaluation is not None
    real, made = run.evaluation.collate, [0]

    def collate(samples: list[Any]) -> dict[str, Any]:
        made[0] += 1
        if made[0] == stop_in:
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop_in is None or made[0] < stop_in + 5, "the evaluation continues"
        return real(samples)

    return replace(run, evaluation=replace(run.evaluation, collate=collate))


def evaluations(folder: Path) -> dict[int, tuple[float, float]]:
    return {event["step"]: (event["loss"], event["accuracy"]) for event in events(folder, "evaluated")}


@pytest.mark.parametrize("batch", slow_but([1, 30, 50], lambda batch: batch == 50))
def test_our_own_loop_evaluates_that_step_again(batch: int, tmp_path: Path) -> None:
    """The signal arrives in the first evaluation of 21 batches, in the second, or after the last step."""
    whole = train(evaluating_run(tmp_path / "whole"))
    cut = train(evaluating_run(tmp_path / "cut", stop_in=batch))
    step = 2 * (1 + batch // 21)
    assert (cut.outcome, cut.exit_code, cut.step) == ("stopped", 75, step)
    assert verify(tmp_path / "cut" / f"checkpoint-{step}", step)
    assert step not in evaluations(tmp_path / "cut")
    resumed = train(evaluating_run(tmp_path / "cut"))
    assert resumed.outcome == "finished"
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert evaluations(tmp_path / "cut") == evaluations(tmp_path / "whole")
    assert_same_weights(resumed.model, whole.model)


def test_patience_is_counted_once_where_an_evaluation_was_abandoned(tmp_path: Path) -> None:
    more = {"early_stopping_patience": 1, "early_stopping_threshold": 9.0, "max_steps": 12}
    cut = train(evaluating_run(tmp_path, stop_in=25, **more))
    assert (cut.outcome, cut.step) == ("stopped", 4)
    resumed = train(evaluating_run(tmp_path, **more))
    assert (resumed.outcome, resumed.step) == ("stopped early", 4)
    again = train(evaluating_run(tmp_path, **more))
    assert (again.outcome, again.step) == ("stopped early", 4), "an ended run takes no more steps"


def test_a_run_that_is_finished_gives_its_result_again(tmp_path: Path) -> None:
    done, told = train(evaluating_run(tmp_path)), []
    again = train(evaluating_run(tmp_path), watch=told.append)
    assert (again.outcome, again.step, again.loss) == ("finished", 6, done.loss)
    assert again.evaluated == done.evaluated
    assert_same_weights(again.model, done.model)
    assert any("This run is finished" in event.get("text", "") for event in told)
    assert len(events(tmp_path, "step")) == 6


def test_a_checkpoint_is_kept_where_one_batch_took_all_the_time(tmp_path: Path) -> None:
    """The time for a checkpoint had run out before the save began, so the save gets the same time again."""
    run = evaluating_run(tmp_path, stop_in=1, stop_seconds=30)
    real = run.evaluation.collate  # type: ignore[union-attr]
    clock = [0.0]

    def slow(samples: list[Any]) -> dict[str, Any]:
        made = real(samples)
        clock[0] += 31
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("snugfit.training.interrupt.time.monotonic", lambda: clock[0])
        cut = train(replace(run, evaluation=replace(run.evaluation, collate=slow)))  # type: ignore[type-var]
    assert cut.outcome == "stopped"
    assert verify(tmp_path / "checkpoint-2", 2)


def test_a_closed_terminal_keeps_a_checkpoint(tmp_path: Path) -> None:
    def hang_up(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 3:
            os.kill(os.getpid(), signal.SIGHUP)

    done = train(small_run(tmp_path), watch=hang_up)
    assert (done.outcome, done.exit_code, done.step) == ("stopped", 75, 3)
    assert verify(tmp_path / "checkpoint-3", 3)


def test_a_hangup_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """`nohup` sets this action."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupts(tmp_path) as interrupts:
        os.kill(os.getpid(), signal.SIGHUP)
        assert interrupts.stopping is None


def test_the_save_before_the_last_is_not_waited_for_beyond_the_time_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow disk, the save of step 1 continues until its stop flag is set."""
    seal, stopped = store.seal, []

    def slowly(folder: Path, step: int, about: Any, stop: Callable[[], bool]) -> Any:
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            if stop():
                stopped.append(step)
                raise SaveStopped(f"The save of step {step} was stopped.")
        return seal(folder, step, about, stop)

    monkeypatch.setattr(store, "seal", slowly)
    told: list[dict[str, Any]] = []
    manager = CheckpointManager(store.Store(tmp_path), Journal(None, told.append), CPU, limit=None)
    manager.is_too_late = lambda: True
    for step in (1, 2):
        manager.save(step, lambda staging, step=step: SavedStep(step))  # type: ignore[misc]
    manager.wait()
    assert stopped == [1, 2]
    assert [event["text"][:26] for event in told] == [
        "The save of step 1 was sto",
        "The save of step 2 was sto",
    ]
    assert manager.failure is not None


def test_old_checkpoints_that_stay_are_no_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    checkpoints = store.Store(tmp_path)

    def refuse(*_: Any) -> None:
        raise SnugfitError("Old checkpoints could not be removed.")

    monkeypatch.setattr(checkpoints, "retain", refuse)
    manager = CheckpointManager(checkpoints, Journal(None, told.append), CPU, limit=1)
    manager.save(1, lambda staging: SavedStep(1))  # type: ignore[arg-type, return-value]
    manager.wait()
    assert [event["event"] for event in told] == ["saved", "warning"]
    assert told[1]["text"] == "Old checkpoints could not be removed. The run continues."
    assert manager.failure is None


@dataclass
class SavedStep:
    """A saved step of one small file."""

    step: int
    bytes: int = 0

    def write(self, folder: Path) -> None:
        (folder / "file").write_text("x")
