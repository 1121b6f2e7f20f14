"""Allocation retries in consecutive steps: the run continues with the next recipe, or reports that it
cannot."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from small_runs import bert_job, events, losses, small_run
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.techniques.recipe import Recipe
from snugfit.training import step_logger
from snugfit.training.journal import Journal
from snugfit.training.run.loop import TrainingStep, WeightsNonFinite
from snugfit.training.run.train import train
from snugfit.training.run.trained import LastCheckpointNotSaved


def short(monkeypatch: pytest.MonkeyPatch, retries: dict[int, int]) -> None:
    """Fake the allocator's count of retries. It grows by these numbers at these readings, one after each
    step."""
    state = {"read": -1, "count": 0}  # the first reading is before the first step

    def retries_of(device: torch.device) -> int:
        state["read"] += 1
        state["count"] += retries.get(state["read"], 0)
        return state["count"]

    monkeypatch.setattr(step_logger, "retries_of", retries_of)


def still(job: Job) -> Job:
    facts = {**job.model.config, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return replace(job, model=Model.from_config(facts, name="still"))


@pytest.mark.whole
@pytest.mark.parametrize("save_strategy", ["steps", "no"])
def test_three_steps_in_a_row_lead_to_the_next_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_strategy: str
) -> None:
    job = still(bert_job(clip=1.0))
    train(small_run(tmp_path / "whole", "sgd", job=job))
    short(monkeypatch, {2: 1, 4: 1, 5: 2, 6: 1})
    asked: list[tuple[str, str]] = []

    def replan(job: Job, recipe: Recipe, cause: str) -> Recipe:
        asked.append((str(recipe), cause))
        return Recipe.parse("sgd + micro_batches(2)")

    run = small_run(tmp_path / "run", "sgd", job=job, save_strategy=save_strategy)
    done = train(run, replan=replan)
    assert asked == [("sgd", "allocation retries")]
    (told,) = events(tmp_path / "run", "replanned")
    assert (told["step"], told["before"], told["recipe"]) == (7, "sgd", "micro_batches(2) + sgd")
    assert str(done.recipe) == "micro_batches(2) + sgd"
    assert [event["step"] for event in events(tmp_path / "run", "step")] == list(range(1, 13)), "none twice"
    ours, theirs = losses(tmp_path / "run"), losses(tmp_path / "whole")
    assert [each[0] for each in ours.values()] == pytest.approx(
        [each[0] for each in theirs.values()], rel=1e-5
    )


@pytest.mark.whole
def test_dropout_goes_on_with_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run restarts with the same recipe, and equals an uninterrupted run bit for bit."""
    train(small_run(tmp_path / "whole"))
    short(monkeypatch, {4: 1, 5: 1, 6: 1})
    train(small_run(tmp_path / "run"), replan=lambda job, recipe, cause: recipe)
    assert events(tmp_path / "run", "replanned")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.whole
@pytest.mark.parametrize("why", ["short", "out", "wrong"])
def test_what_was_built_before_is_given_back_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Two models at once would exceed a memory that was too small for one."""
    from snugfit.training.run import active_run as opened

    plain, before = opened.open_run, []

    def open_run(*given: Any) -> Any:
        assert [each() for each in before] == [None] * len(before)
        running = plain(*given)
        before.append(weakref.ref(running.model))
        return running

    monkeypatch.setattr(opened, "open_run", open_run)
    faults = {"out": lambda: torch.OutOfMemoryError("CUDA out of memory."), "wrong": WeightsNonFinite}
    plain_take, taken = TrainingStep.take, [0]

    def take(self: TrainingStep, running: Any, *more: Any) -> Any:
        taken[0] += 1
        if taken[0] == 4 and why in faults:
            raise faults[why]()
        return plain_take(self, running, *more)

    monkeypatch.setattr(TrainingStep, "take", take)
    if why == "short":
        short(monkeypatch, {1: 1, 2: 1, 3: 1})
    train(small_run(tmp_path), replan=lambda job, recipe, cause: recipe)
    assert len(before) == 2


@pytest.mark.whole
def test_without_another_recipe_it_goes_on_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short(monkeypatch, dict.fromkeys(range(1, 13), 1))
    done = train(small_run(tmp_path))
    assert (done.outcome, done.step) == ("finished", 12)
    (told,) = [event["text"] for event in events(tmp_path, "warning")]
    assert "allocation retries, 3 steps in a row" in told
    assert "there is no other recipe to try" in told


@pytest.mark.whole
def test_what_cannot_be_kept_is_no_reason_to_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from snugfit.training.checkpoint.store import Store

    short(monkeypatch, {4: 1, 5: 1, 6: 1})

    def full(self: Store, *_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Store, "save", full)
    with pytest.raises(LastCheckpointNotSaved, match="last checkpoint was not saved") as refused:
        train(small_run(tmp_path, save_steps=3), replan=lambda *_: Recipe.parse("micro_batches(2)"))
    assert (refused.value.trained.step, refused.value.trained.outcome) == (12, "finished")
    assert any(parameter.requires_grad for parameter in refused.value.trained.model.parameters())
    assert [event["step"] for event in events(tmp_path, "step")] == list(range(1, 13))
    assert not events(tmp_path, "replanned")


def test_retries_now_and_then_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    short(monkeypatch, {1: 1, 2: 1, 4: 9, 5: 1, 7: 1})
    logger = step_logger.StepLogger(Journal(None), torch.device("cpu"), every=1)
    logger.watch_retries()
    assert not any(logger.is_thrashing() for _ in range(9))


def test_a_cpu_has_no_allocator_that_starts_over() -> None:
    assert step_logger.retries_of(torch.device("cpu")) == 0
