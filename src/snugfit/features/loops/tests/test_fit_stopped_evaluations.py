"""A signal during a fitted trainer's evaluation ends the evaluation and writes a checkpoint.

The resumed run repeats that evaluation first. Its log, callbacks and best model therefore equal those of an
uninterrupted run.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fitted import classified, fitted, killed, log_of, model_of, trained, trainer_of
from small_runs import assert_same_weights
from snugfit.errors import UsageError
from snugfit.training.checkpoint.manifest import verify
from test_fit_keeping import At, Killed, die
from tiers import slow_but

pytestmark = pytest.mark.whole

STEPS = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 4}
EPOCHS = {"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 4, "logging_strategy": "epoch"}
BEST = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best", "metric_for_best_model": "loss"}
PATIENCE = {**STEPS, "metric_for_best_model": "loss", "greater_is_better": True}


def run_of(folder: Path, *, stop_in: int = 0, callbacks: Any = (), **more: Any) -> Any:
    """Return a fitted trainer with dropout and six steps per epoch.

    SIGTERM comes in forward pass `stop_in`, counted over all evaluations; each evaluation has five.
    """
    wanted: dict[str, Any] = {
        "max_steps": 8, "train_sampling_strategy": "random", "logging_steps": 1, "seed": 5,
        "per_device_eval_batch_size": 4, **more,
    }  # fmt: skip
    torch.manual_seed(3)
    given = {"eval_dataset": classified(20), "callbacks": list(callbacks)}
    trainer = trainer_of(
        folder, model_of("bert", layers=1, dropout=0.2), classified(22), more=given, **wanted
    )
    made = [0]

    def count(module: Any, arguments: Any) -> None:
        if not module.training and trainer.control.should_evaluate:
            made[0] += 1
            assert not stop_in or made[0] <= stop_in, "the evaluation continues"
            if made[0] == stop_in:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer.model.register_forward_pre_hook(count)
    return fitted(trainer, "micro_batches(2)")


def dies_in_evaluations(trainer: Any) -> Any:
    """Return a hook that raises an error in a forward pass of an evaluation."""

    def hook(module: Any, arguments: Any) -> None:
        if not module.training and trainer.control.should_evaluate:
            die()

    return hook


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run each uninterrupted case once and store its result."""
    runs: dict[str, Any] = {}

    def made(more: dict[str, Any]) -> Any:
        if repr(more) not in runs:
            runs[repr(more)] = run_of(tmp_path_factory.mktemp("whole"), **more)
            runs[repr(more)].train()
        return runs[repr(more)]

    return made


CASES: list[Any] = [
    (STEPS, 3, 2),
    (STEPS, 12, 6),
    (STEPS, 17, 8),
    (EPOCHS, 2, 6),
    (EPOCHS, 8, 8),
    (BEST, 8, 4),
]


@pytest.mark.parametrize(("more", "stop_in", "step"), slow_but(CASES, lambda case: case[:2] == (EPOCHS, 8)))
def test_a_resumed_run_makes_the_evaluation_that_was_abandoned(
    more: dict[str, Any], stop_in: int, step: int, whole: Any, tmp_path: Path
) -> None:
    """The signal comes in the first evaluation, at an epoch's end, or after the last step.

    Evaluations run by steps, by epochs, or for the best model.
    """
    whole = whole(more)
    cut = run_of(tmp_path / "cut", stop_in=stop_in, **more)
    with pytest.raises(SystemExit) as ended:
        cut.train()
    assert (ended.value.code, cut.state.global_step) == (75, step)
    assert verify(tmp_path / "cut" / f"checkpoint-{step}", step)
    resumed = trained(run_of(tmp_path / "cut", **more), True)
    assert_same_weights(resumed.model, whole.model)
    assert log_of(resumed) == log_of(whole)
    assert resumed.state.best_metric == whole.state.best_metric
    assert resumed.state.best_global_step == whole.state.best_global_step
    assert resumed.state.global_step == whole.state.global_step


def test_patience_is_counted_once_and_ends_the_run_where_it_would_have(tmp_path: Path) -> None:
    def made(folder: Path, stop_in: int = 0) -> Any:
        patience = transformers.EarlyStoppingCallback(1, early_stopping_threshold=9.0)
        return run_of(folder, stop_in=stop_in, callbacks=[patience], load_best_model_at_end=True, **{
            **PATIENCE, "save_steps": 2,
        })  # fmt: skip

    whole = trained(made(tmp_path / "whole"))
    assert whole.state.global_step == 4
    with pytest.raises(SystemExit):
        made(tmp_path / "cut", stop_in=7).train()
    for _ in range(2):
        resumed = trained(made(tmp_path / "cut"), True)
        assert resumed.state.global_step == 4
        assert resumed.state.best_global_step == whole.state.best_global_step
        assert_same_weights(resumed.model, whole.model)


@pytest.mark.slow
def test_several_sets_are_all_evaluated_again(tmp_path: Path) -> None:
    def made(folder: Path, stop_in: int = 0) -> Any:
        trainer = run_of(folder, stop_in=stop_in, **STEPS)
        trainer.eval_dataset = {"one": classified(20), "two": classified(8)}
        return trainer

    whole = trained(made(tmp_path / "whole"))
    with pytest.raises(SystemExit):
        made(tmp_path / "cut", stop_in=6).train()
    resumed = trained(made(tmp_path / "cut"), True)
    assert log_of(resumed) == log_of(whole)
    assert_same_weights(resumed.model, whole.model)


def test_a_signal_before_the_evaluation_is_not_kept_waiting(tmp_path: Path) -> None:
    """A signal in training ends the run before any evaluation, also before that of the abandoned epoch."""
    for more in (STEPS, EPOCHS):
        folder = tmp_path / more["eval_strategy"]
        trainer = run_of(folder, **more)
        trainer.add_callback(At(2, lambda: os.kill(os.getpid(), signal.SIGTERM)))
        trainer.model.register_forward_pre_hook(dies_in_evaluations(trainer))
        with pytest.raises(SystemExit):
            trainer.train()
        assert verify(folder / "checkpoint-2", 2)
        assert not any("eval_loss" in line for line in trainer.state.log_history)


def test_an_epochs_end_that_did_not_come_is_made_up_for(tmp_path: Path) -> None:
    """The process is killed in the evaluation at an epoch's end, after the checkpoint of its last step."""
    more = {**EPOCHS, "save_steps": 6}
    whole = trained(run_of(tmp_path / "whole", **more))
    cut = run_of(tmp_path / "cut", **more)
    cut.model.register_forward_pre_hook(dies_in_evaluations(cut))
    killed(cut)
    resumed = trained(run_of(tmp_path / "cut", **more), True)
    assert log_of(resumed) == log_of(whole)
    assert_same_weights(resumed.model, whole.model)


def test_a_checkpoint_on_demand_is_kept_where_only_the_best_are(tmp_path: Path) -> None:
    more = {**BEST, "greater_is_better": True, "eval_steps": 1, "metric_for_best_model": "runtime"}
    trainer = run_of(tmp_path, **more)
    trainer.state.best_metric = float("inf")
    trainer.add_callback(At(4, lambda: os.kill(os.getpid(), signal.SIGUSR1)))

    def never_best(metrics: dict[str, float], trial: Any) -> bool:
        return False

    trainer._determine_best_metric = never_best
    trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]


def test_the_checkpoint_of_a_signal_stays_where_the_limit_is_one(tmp_path: Path) -> None:
    """transformers removes all checkpoints but the best at the end of training."""
    more: dict[str, Any] = {**STEPS, "save_steps": 2, "save_total_limit": 1, "load_best_model_at_end": True}
    more |= {"metric_for_best_model": "loss", "greater_is_better": True}
    trainer = run_of(tmp_path, **more)
    trainer.add_callback(At(7, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    with pytest.raises(SystemExit):
        trainer.train()
    assert verify(tmp_path / "checkpoint-7", 7)
    resumed = trained(run_of(tmp_path, **more), True)
    best = resumed.state.best_global_step
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{best}"], (
        "as in transformers"
    )


# ---- restarted ------------------------------------------------------------------------------------------


@pytest.fixture
def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the list of this process's folders, as if another process ran."""
    monkeypatch.setattr("snugfit.features.loops.trainer.checkpoints.FOLDERS_OF_THIS_PROCESS", NoFolders())


class NoFolders(set[Path]):
    def __contains__(self, folder: object) -> bool:
        return False


@pytest.mark.usefixtures("another_process")
def test_a_run_that_has_finished_gives_its_callbacks_their_states_again(tmp_path: Path) -> None:
    def run(callback: transformers.EarlyStoppingCallback) -> Any:
        return run_of(tmp_path, **PATIENCE | {"max_steps": 4}, callbacks=[callback])

    run(transformers.EarlyStoppingCallback(5, 0.25)).train()
    again = run(transformers.EarlyStoppingCallback())
    again.train(resume_from_checkpoint=True)
    restored = again.callback_handler.callbacks[-1]
    assert (restored.early_stopping_patience, restored.early_stopping_threshold) == (5, 0.25)


@pytest.mark.usefixtures("another_process")
@pytest.mark.parametrize("best", slow_but([False, True], lambda best: best))
def test_a_run_that_has_finished_gives_its_result_again(best: bool, tmp_path: Path) -> None:
    more: dict[str, Any] = {**PATIENCE, "save_steps": 2}
    if best:
        more |= {"load_best_model_at_end": True, "save_total_limit": 1}
    first = run_of(tmp_path, **more)
    output = first.train()
    files = sorted(path.name for path in tmp_path.iterdir())
    for resume in (None, True):
        again = run_of(tmp_path, **more)
        assert again.train(resume_from_checkpoint=resume) == output
        assert any("finished after step 8" in event.get("text", "") for event in again.told)
        assert again.state.log_history == first.state.log_history
        assert_same_weights(again.model, first.model)
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    longer = trained(run_of(tmp_path, **{**more, "learning_rate": 1e-4}))
    assert len(log_of(longer)) == len(log_of(first)), "a new run starts, and the old folder is kept"
    assert any(path.name.endswith(".before-restart") for path in tmp_path.iterdir())


def test_who_trains_twice_or_says_so_trains_anew(tmp_path: Path) -> None:
    trained(run_of(tmp_path, max_steps=2, save_strategy="steps"))
    for resume in (None, False):
        again = run_of(tmp_path, max_steps=2, save_strategy="steps")
        again.train(resume_from_checkpoint=resume)
        assert not any("has finished" in event.get("text", "") for event in again.told)


@pytest.mark.slow
def test_a_run_without_a_step_left_takes_none(whole: Any, tmp_path: Path) -> None:
    """The process is killed after the checkpoint of its last step, within an epoch."""
    whole = whole(STEPS)
    cut = run_of(tmp_path / "cut", **STEPS)

    class AtEnd(transformers.TrainerCallback):
        def on_train_end(self, *arguments: Any, **more: Any) -> None:
            raise Killed

    cut.add_callback(AtEnd())
    killed(cut)
    resumed = trained(run_of(tmp_path / "cut", **STEPS), True)
    assert resumed.state.global_step == 8
    assert_same_weights(resumed.model, whole.model)
    assert log_of(resumed) == log_of(whole)


def test_what_is_refused_moves_nothing(tmp_path: Path) -> None:
    run_of(tmp_path, max_steps=6, save_strategy="steps", save_steps=2).train()
    files = sorted(path.name for path in tmp_path.iterdir())
    other = run_of(tmp_path, max_steps=6, save_strategy="steps", save_steps=2, weight_decay=0.3)
    with pytest.raises(UsageError, match="weight_decay"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert sorted(path.name for path in tmp_path.iterdir()) == files
