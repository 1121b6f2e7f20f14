"""A run that returns to an earlier checkpoint keeps later ones under other names, reports that, and never
resumes from them. All three front-ends do so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fitted import killed
from small_runs import small_run
from snugfit.errors import SnugfitError, UsageError
from snugfit.training.run.train import train
from test_accelerate import go, loop_of
from test_fit_keeping import At, die, run_of

pytestmark = pytest.mark.whole

SUPERSEDED = ["checkpoint-4.superseded", "checkpoint-6.superseded"]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def said(told: list[dict[str, Any]]) -> list[str]:
    return [event["text"] for event in told if "resumes from" in event.get("text", "")]


def test_fit_goes_back(tmp_path: Path) -> None:
    killed(run_of(tmp_path, at=At(7, die), logging_steps=1))
    back = run_of(tmp_path, at=At(3, die), logging_steps=1)
    killed(back, str(tmp_path / "checkpoint-2"))
    assert checkpoints(tmp_path) == ["checkpoint-2", *SUPERSEDED]
    assert said(back.told) == [
        "The run resumes from checkpoint-2; checkpoint-6 was renamed to checkpoint-6.superseded.",
        "The run resumes from checkpoint-2; checkpoint-4 was renamed to checkpoint-4.superseded.",
    ]
    again = run_of(tmp_path, at=At(5, die), logging_steps=1)
    killed(again, True)
    steps = [line["step"] for line in again.state.log_history]
    assert steps[:3] == [1, 2, 3], "the run continued after step 2"
    assert "checkpoint-4" in checkpoints(tmp_path)


def test_fit_puts_aside_all_that_stands_beside_a_checkpoint_from_elsewhere(tmp_path: Path) -> None:
    run_of(tmp_path / "one", max_steps=4).train()
    run_of(tmp_path / "two", max_steps=2).train()
    other = run_of(tmp_path / "two", max_steps=4)
    other.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-2"))
    assert checkpoints(tmp_path / "two") == ["checkpoint-2.before-restart", "checkpoint-4"]


def test_our_own_loop_goes_back(tmp_path: Path) -> None:
    train(small_run(tmp_path, save_steps=2, max_steps=6, save_total_limit=None))
    told: list[dict[str, Any]] = []
    done = train(
        small_run(tmp_path, save_steps=100, max_steps=6), watch=told.append,
        resume_from=tmp_path / "checkpoint-2",
    )  # fmt: skip
    assert (done.outcome, done.step) == ("finished", 6)
    assert checkpoints(tmp_path) == ["checkpoint-2", *SUPERSEDED[:1], "checkpoint-6", *SUPERSEDED[1:]]
    assert len(said(told)) == 2


def test_accelerate_goes_back(tmp_path: Path) -> None:
    go(loop_of(tmp_path), save=2, stop=2)
    run = loop_of(tmp_path)
    run.resume()
    go(run, save=4, stop=4)
    back = loop_of(tmp_path)
    assert back.resume(tmp_path / "checkpoint-2")
    assert back.steps == 2
    back.close()
    assert checkpoints(tmp_path) == ["checkpoint-2", *SUPERSEDED[:1]]
    again = loop_of(tmp_path)
    assert again.resume()
    assert again.steps == 2
    again.close()


def test_what_is_no_checkpoint_of_the_folder_is_refused_and_nothing_moves(tmp_path: Path) -> None:
    train(small_run(tmp_path / "one", save_steps=2, max_steps=4))
    train(small_run(tmp_path / "two", save_steps=2, max_steps=4))
    for named, says in (
        (tmp_path / "one" / "checkpoint-3", r"folder checkpoint-N.*has checkpoint-2, checkpoint-4"),
        (tmp_path / "two" / "checkpoint-2", "Name one of the checkpoints in it"),
    ):
        with pytest.raises(UsageError, match=says):
            train(small_run(tmp_path / "one", max_steps=4), resume_from=named)
    (tmp_path / "one" / "checkpoint-2" / "model.safetensors").unlink()
    with pytest.raises(SnugfitError, match=r"one/checkpoint-2: model.safetensors is missing"):
        train(small_run(tmp_path / "one", max_steps=4), resume_from=tmp_path / "one" / "checkpoint-2")
    assert checkpoints(tmp_path / "one") == ["checkpoint-2", "checkpoint-4"]
