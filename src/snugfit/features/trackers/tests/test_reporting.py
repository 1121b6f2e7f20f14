"""`report_to` in the own loop: transformers' trackers receive a run's events, and TensorBoard reads all of
them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.integrations import integration_utils

from small_runs import bert_job, events, killed_in, losses, small_run
from snugfit.errors import SnugfitError, UsageError
from snugfit.frontends.own import train as snugfit_train
from snugfit.techniques.recipe import Recipe
from snugfit.training.run.loop import TrainingStep
from snugfit.training.run.train import train
from tensorboards import logs_under, scalars_in
from tiers import slow_but

BOARD: dict[str, Any] = {"report_to": "tensorboard", "logging_steps": 3}


def means(folder: Path, every: int) -> dict[int, float]:
    """Return the means of the logged losses over each `every` steps."""
    taken = [loss for _, (loss, *_) in sorted(losses(folder).items())]
    return {
        step: sum(taken[step - every : step]) / every
        for step in range(1, len(taken) + 1)
        if step % every == 0
    }


@pytest.mark.whole
@pytest.mark.parametrize("save_steps", slow_but([5, 500], 1), ids=["resumed", "begun again"])
def test_a_killed_run_goes_on_in_the_same_log(tmp_path: Path, save_steps: int) -> None:
    """The run is killed after step 8, and resumes after step 5 or from the beginning. The log has every
    line once, under the Trainer's names."""
    more = {**BOARD, "save_steps": save_steps, "eval_strategy": "steps", "eval_steps": 4}
    killed_in(small_run(tmp_path, **more), 8)
    train(small_run(tmp_path, **more))
    (log,) = logs_under(tmp_path)
    found = scalars_in(log)
    assert dict(found["train/loss"]) == pytest.approx(means(tmp_path, 3), rel=1e-6)
    told = losses(tmp_path)
    for place, tag in ((1, "train/grad_norm"), (2, "train/learning_rate")):
        assert found[tag] == [(step, pytest.approx(told[step][place], rel=1e-6)) for step in (3, 6, 9, 12)]
    evaluated = {event["step"]: event for event in events(tmp_path, "evaluated")}
    for name in ("loss", "accuracy"):
        assert found[f"eval/{name}"] == [
            (step, pytest.approx(evaluated[step][name], rel=1e-6)) for step in (4, 8, 12)
        ]
    assert [step for step, _ in found["train/epoch"]] == [3, 4, 6, 8, 9, 12, 12, 12]


@pytest.mark.whole
def test_a_run_that_begins_anew_has_a_log_of_its_own(tmp_path: Path) -> None:
    for restart in (False, True):
        train(small_run(tmp_path, max_steps=3, **BOARD), restart=restart)
    assert [[step for step, _ in scalars_in(log)["train/loss"]] for log in logs_under(tmp_path)] == [[3], [3]]


@pytest.mark.whole
def test_steps_that_are_taken_again_in_one_process_stand_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out in the update of step 7. The run returns to step 4 and continues with another
    recipe."""
    import torch

    plain, count = TrainingStep.take, [0]

    def take(self: TrainingStep, running: Any, *more: Any) -> Any:
        count[0] += 1
        taken = plain(self, running, *more)
        if count[0] == 7:
            self.phases.phase("update")
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return taken

    monkeypatch.setattr(TrainingStep, "take", take)
    heard = registered(monkeypatch)
    run = small_run(tmp_path, save_steps=4, logging_steps=1, report_to="tensorboard, tracker")
    train(run, replan=lambda job, recipe, cause: Recipe.parse("micro_batches(2)"))
    (log,) = logs_under(tmp_path)
    assert [step for step, _ in scalars_in(log)["train/loss"]] == list(range(1, 13))
    assert [step for name, step, logs in heard if name == "on_log" and "loss" in logs] == list(range(1, 13))


def registered(monkeypatch: pytest.MonkeyPatch, *, breaks: bool = False) -> list[tuple[str, int, Any]]:
    """Add a custom tracker to those of transformers, and return the list of its received events."""
    heard: list[tuple[str, int, Any]] = []

    class Tracker(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            heard.append(("on_train_begin", state.max_steps, (args, model)))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if breaks:
                raise ConnectionError("nobody answers")
            heard.append(("on_log", state.global_step, dict(logs)))
            logs.clear()

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
            heard.append(("on_evaluate", state.global_step, metrics))

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            assert (Path(args.output_dir) / f"checkpoint-{state.global_step}").is_dir()
            heard.append(("on_save", state.global_step, None))

        def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            heard.append(("on_train_end", state.global_step, model))

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tracker", Tracker)
    return heard


@pytest.mark.whole
def test_every_tracker_hears_what_the_trainer_would_tell_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = registered(monkeypatch)
    more = {"logging_steps": 6, "eval_strategy": "steps", "save_steps": 6, "run_name": "seventh"}
    done = train(small_run(tmp_path, "micro_batches(2) + bf16", report_to=["tracker"], **more))
    names = [(name, step) for name, step, _ in heard]
    assert names[0] == ("on_train_begin", 12)
    assert names[-1] == ("on_train_end", 12)
    assert {("on_log", 6), ("on_evaluate", 6), ("on_save", 6), ("on_save", 12)} <= set(names)
    args, model = heard[0][2]
    assert (args.run_name, args.gradient_accumulation_steps, args.per_device_train_batch_size) == (
        "seventh",
        2,
        2,
    )
    assert args.to_dict()["recipe"] == "bf16 + micro_batches(2)"
    assert args.max_grad_norm == 1.0
    assert model is heard[-1][2] is done.model
    first = next(logs for name, _, logs in heard if name == "on_log")
    assert first.keys() == {"loss", "grad_norm", "learning_rate", "epoch"}


@pytest.mark.whole
def test_a_tracker_that_fails_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = registered(monkeypatch, breaks=True)
    done = train(small_run(tmp_path, report_to="tracker", logging_steps=2))
    assert done.outcome == "finished"
    (told,) = [event["text"] for event in events(tmp_path, "warning")]
    assert "nobody answers" in told
    assert [name for name, *_ in heard] == ["on_train_begin"]


def test_a_run_that_fails_closes_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = registered(monkeypatch)

    def broken(self: TrainingStep, *_: Any) -> Any:
        raise SnugfitError("no")

    monkeypatch.setattr(TrainingStep, "take", broken)
    with pytest.raises(SnugfitError):
        train(small_run(tmp_path, report_to="tracker"))
    assert [name for name, *_ in heard] == ["on_train_begin"], "it has not ended, and may be resumed"


@pytest.mark.parametrize(
    ("given", "told"),
    [("tensorbord", "Did you mean 'tensorboard'?"), (["none", "mlflow"], "'none'"), (3, "names of trackers")],
)
def test_a_name_that_is_none_is_told(tmp_path: Path, given: Any, told: str) -> None:
    with pytest.raises(UsageError, match="report_to is") as refusal:
        snugfit_train(bert_job(), "plain", "no-such-file.jsonl", output_dir=tmp_path / "out", report_to=given)
    assert told in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_told_before_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: False)
    run = replace(small_run(tmp_path / "out", **BOARD), folder=tmp_path / "out")
    with pytest.raises(UsageError, match="'tensorboard', but its package is not installed"):
        train(run)
    assert not (tmp_path / "out").exists()


@pytest.mark.whole
def test_accelerates_state_is_a_users_own(tmp_path: Path) -> None:
    """Trainer arguments that a user creates reset accelerate's state."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    Accelerator(cpu=True)
    held = [dict(each._shared_state) for each in (AcceleratorState, PartialState)]
    train(small_run(tmp_path, max_steps=1, **BOARD))
    assert [dict(each._shared_state) for each in (AcceleratorState, PartialState)] == held
