"""Real processes under real kills: the run can always resume. The tests use the CPU and dropout."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from clean_forks import Forks
from dying_files import dies, points
from small_runs import assert_same_weights, bert_job, events, losses, small_run
from snugfit.errors import UsageError
from snugfit.training.checkpoint import manifest
from snugfit.training.checkpoint.manifest import verify
from snugfit.training.checkpoint.store import Store
from snugfit.training.interrupt import TRIGGER
from snugfit.training.run.train import train
from snugfit.training.run.trained import Trained
from tiers import slow_but

pytestmark = [pytest.mark.whole, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")]

KILLS = 50
"""SIGKILLs in each of the four storms."""

LONGEST = 0.25
"""Maximum lifetime of a process in seconds. Most runs are killed several times, and some reach their end."""


SHALLOW = bert_job(clip=1.0)


def weathers(folder: str) -> int:
    """Train one layer, and save every step."""
    return train(small_run(Path(folder), job=SHALLOW, save_steps=1)).exit_code


def trains(folder: str, options: dict[str, Any]) -> int:
    """Train to the end, and return the exit code of the run."""
    return train(small_run(Path(folder), **options)).exit_code


def trains_with_watchful_workers(folder: str, options: dict[str, Any]) -> int:
    """Train with workers that check their trainer more often than every five seconds."""
    from torch.utils.data._utils import worker

    worker.MP_STATUS_CHECK_INTERVAL = 0.2
    return trains(folder, options)


def saves_slowly(folder: str) -> int:
    """Make the checkpoints after the first take longer than any timeout."""
    plain = Store.save

    def save(self: Store, step: int, *given: object, **more: object) -> object:
        if step > 2:
            time.sleep(30)
        return plain(self, step, *given, **more)  # type: ignore[arg-type]

    Store.save = save  # type: ignore[method-assign, assignment]
    return trains(folder, {"max_steps": 400, "save_steps": 2})


def reads_slowly(folder: str) -> int:
    """Make the read of each checkpoint file take longer than the run may."""
    plain = manifest._contents

    def contents(*given: object, **more: object) -> object:
        time.sleep(0.2)
        return plain(*given, **more)  # type: ignore[arg-type]

    manifest._contents = contents  # type: ignore[assignment]
    return trains(folder, {"max_steps": 4000, "stop_seconds": 0.01})


def until(what: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def steps_told(folder: Path) -> int:
    try:
        return max(losses(folder), default=0)
    except FileNotFoundError:
        return 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_moment_it_goes_on(tmp_path: Path, forks: Forks, seed: int) -> None:
    """SIGKILL hits at seeded moments. Each run that reaches its end has exactly the numbers of an
    undisturbed one."""
    draw, kills, finished = random.Random(seed), 0, 0
    whole = train(small_run(tmp_path / "whole", job=SHALLOW))
    while kills < KILLS:
        folder = tmp_path / f"run-{finished}"
        child = forks.start(weathers, str(folder))
        time.sleep(draw.uniform(0.0, LONGEST))
        os.kill(child, signal.SIGKILL)
        code = forks.ended(child)
        kills += 1
        if code == 0:  # it had ended before
            finished += 1
            assert losses(folder) == losses(tmp_path / "whole")
    folder = tmp_path / f"run-{finished}"
    done = train(small_run(folder, job=SHALLOW, save_steps=1))
    assert losses(folder) == losses(tmp_path / "whole")
    assert_same_weights(done.model, whole.model)
    assert not Store(folder).broken


POINTS = 6
"""Calls to the file system at which a run dies, spread evenly over all of its calls."""


def test_a_run_that_dies_at_any_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training thread writes each checkpoint, so that a number names the same call each time."""
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "snugfit-save":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)

    def begin(folder: Path) -> Trained:
        return train(small_run(folder, job=SHALLOW, max_steps=3, save_steps=1))

    def is_ended(folder: Path, at: int) -> bool:
        return not dies(lambda: begin(folder), at=at)

    whole = begin(tmp_path / "whole")
    calls = points(lambda: begin(tmp_path / "again"))
    kept = []
    for at in range(1, calls, calls // POINTS):
        folder = tmp_path / f"run-{at}"
        is_over = is_ended(folder, at)
        found = Store(folder).newest()
        kept.append(found.step if found else 0)
        done = begin(folder)
        assert losses(folder) == losses(tmp_path / "whole"), at
        assert_same_weights(done.model, whole.model)
        assert not Store(folder).broken
        assert is_over == (kept[-1] == 3 and not events(folder, "started")[1:])
    assert kept == sorted(kept), "a checkpoint was lost again"
    assert {0, 1, 2} <= set(kept)


@pytest.mark.parametrize(("name", "code"), slow_but([("SIGTERM", 75), ("SIGINT", 130)], 1))
def test_one_signal_keeps_and_ends(tmp_path: Path, forks: Forks, name: str, code: int) -> None:
    """The run saves at the next boundary, ends with the signal's exit code, and resumes bit for bit."""
    whole = train(small_run(tmp_path / "whole", max_steps=60))
    child = forks.start(trains, str(tmp_path / "run"), {"max_steps": 60})
    until(lambda: steps_told(tmp_path / "run") >= 3)
    os.kill(child, getattr(signal, name))
    assert forks.ended(child) == code
    (told,) = events(tmp_path / "run", "ended")
    assert (told["outcome"], told["step"]) == ("stopped", steps_told(tmp_path / "run"))
    assert 3 <= told["step"] < 60
    verify(tmp_path / "run" / f"checkpoint-{told['step']}", told["step"])
    done = train(small_run(tmp_path / "run", max_steps=60))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert_same_weights(done.model, whole.model)


@pytest.mark.parametrize(("name", "code"), slow_but([("SIGTERM", 143), ("SIGINT", 130)], 1))
def test_two_signals_end_at_once(tmp_path: Path, forks: Forks, name: str, code: int) -> None:
    """The second signal also ends a save, and the earlier checkpoint stays whole."""
    child = forks.start(saves_slowly, str(tmp_path))
    until(lambda: steps_told(tmp_path) >= 3)
    os.kill(child, getattr(signal, name))
    time.sleep(0.3)
    os.kill(child, getattr(signal, name))
    assert forks.ended(child) == code
    found = Store(tmp_path).newest()
    assert found
    assert found.step == 2, "it did not wait for the save"


def test_a_deadline_is_kept(tmp_path: Path, forks: Forks) -> None:
    """A save that would exceed the scheduler's limit is abandoned, and leaves nothing behind."""
    child = forks.start(reads_slowly, str(tmp_path))
    until(lambda: steps_told(tmp_path) >= 2)
    os.kill(child, signal.SIGTERM)
    assert forks.ended(child) == 75
    assert Store(tmp_path).newest() is None


@pytest.mark.parametrize("means", slow_but(["file", "signal"], 1))
def test_a_checkpoint_on_demand_changes_nothing(tmp_path: Path, forks: Forks, means: str) -> None:
    """A signal or a file requests the checkpoint during the run."""
    whole = train(small_run(tmp_path / "whole", max_steps=40))
    child = forks.start(trains, str(tmp_path / "run"), {"max_steps": 40})
    until(lambda: steps_told(tmp_path / "run") >= 2)
    if means == "signal":
        os.kill(child, signal.SIGUSR1)
    else:
        (tmp_path / "run" / TRIGGER).touch()
    assert forks.ended(child) == 0
    kept = [event["step"] for event in events(tmp_path / "run", "saved")]
    assert len(kept) == 2
    assert 2 <= kept[0] < kept[1] == 40
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert not (tmp_path / "run" / TRIGGER).exists()
    assert whole.step == 40


def test_a_killed_run_goes_on(tmp_path: Path, forks: Forks) -> None:
    """Before the SIGKILL, a second run in its folder is refused with the number of the first.

    After it the loader's processes end, and the dead run holds nothing. The next run has the numbers of an
    undisturbed one.
    """
    how: dict[str, Any] = {"recipe": "workers", "max_steps": 20, "save_steps": 1}
    child = forks.start(trains_with_watchful_workers, str(tmp_path / "run"), how)
    until(lambda: len(events(tmp_path / "run", "saved")) >= 2 if steps_told(tmp_path / "run") else False)
    workers = psutil.Process(child).children(recursive=True)
    os.kill(child, signal.SIGSTOP)
    with pytest.raises(UsageError, match=str(child)):
        train(small_run(tmp_path / "run", **how))
    os.kill(child, signal.SIGKILL)
    assert forks.ended(child) == -signal.SIGKILL
    assert workers
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    done = train(small_run(tmp_path / "run", **how))
    assert events(tmp_path / "run", "started")[1]["resumed_from"] >= 1
    whole = train(small_run(tmp_path / "whole", **how))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert_same_weights(done.model, whole.model)
