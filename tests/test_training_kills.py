"""Real processes, really killed: what is left is a run that goes on. On the CPU, with dropout."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from small_runs import assert_same_weights, events, losses, small_run
from snugfit.training.interrupt import TRIGGER
from snugfit.training.manifest import verify
from snugfit.training.store import Store
from snugfit.training.train import train

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")

KILLS = 50
"""SIGKILLs of each storm; there are four."""


def forked(work: Callable[[], int]) -> int:
    """A process that does this, and nothing of pytest's; its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            code = work()
        finally:
            os._exit(code)
    return child


def trains(folder: Path, **options: object) -> int:
    """A process that trains to the end, with the exit code of the run."""
    return forked(lambda: train(small_run(folder, **options)).exit_code)  # type: ignore[arg-type]


def ended(child: int, seconds: float = 60.0) -> int:
    """Its exit code, or minus the signal that ended it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the process did not end")


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


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_moment_it_goes_on(tmp_path: Path, seed: int) -> None:
    """Promise 4, F1, F2: SIGKILL at seeded moments; each run that gets to its end has the very numbers of one
    that nobody touched."""
    draw, kills, finished = random.Random(seed), 0, 0
    train(small_run(tmp_path / "whole"))
    while kills < KILLS:
        folder = tmp_path / f"run-{finished}"
        child = trains(folder, save_steps=1)
        time.sleep(draw.uniform(0.0, 0.35))
        os.kill(child, signal.SIGKILL)
        code = ended(child)
        kills += 1
        if code == 0:  # it was done before
            finished += 1
            assert losses(folder) == losses(tmp_path / "whole")
    folder = tmp_path / f"run-{finished}"
    assert ended(trains(folder, save_steps=1)) == 0
    assert losses(folder) == losses(tmp_path / "whole")
    done, whole = train(small_run(folder, save_steps=1)), train(small_run(tmp_path / "whole"))
    assert_same_weights(done.model, whole.model)
    assert not Store(folder).broken


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_one_signal_keeps_and_ends(tmp_path: Path, name: str, code: int) -> None:
    """F14: a checkpoint at the next border, an exit code that says so, and a resume bit for bit."""
    whole = train(small_run(tmp_path / "whole", max_steps=60))
    child = trains(tmp_path / "run", max_steps=60)
    until(lambda: steps_told(tmp_path / "run") >= 3)
    os.kill(child, getattr(signal, name))
    assert ended(child) == code
    (told,) = events(tmp_path / "run", "ended")
    assert (told["outcome"], told["step"]) == ("stopped", steps_told(tmp_path / "run"))
    assert 3 <= told["step"] < 60
    verify(tmp_path / "run" / f"checkpoint-{told['step']}", told["step"])
    done = train(small_run(tmp_path / "run", max_steps=60))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert_same_weights(done.model, whole.model)


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_two_signals_end_at_once(tmp_path: Path, name: str, code: int) -> None:
    """F15: also while a checkpoint is being written; the one before stays whole."""

    def slow() -> int:
        plain = Store.save

        def save(self: Store, step: int, *given: object, **more: object) -> object:
            if step > 2:
                time.sleep(30)
            return plain(self, step, *given, **more)  # type: ignore[arg-type]

        Store.save = save  # type: ignore[method-assign, assignment]
        return train(small_run(tmp_path, max_steps=400, save_steps=2)).exit_code

    child = forked(slow)
    until(lambda: steps_told(tmp_path) >= 3)
    os.kill(child, getattr(signal, name))
    time.sleep(0.3)
    os.kill(child, getattr(signal, name))
    assert ended(child) == code
    found = Store(tmp_path).newest()
    assert found
    assert found.step == 2, "it did not wait for the save"


def test_a_deadline_is_kept(tmp_path: Path) -> None:
    """F16: a save that would take longer than the scheduler gives is given up, and leaves nothing behind."""

    def slow() -> int:
        from snugfit.training import manifest

        plain = manifest._contents

        def contents(*given: object, **more: object) -> object:
            time.sleep(0.2)
            return plain(*given, **more)  # type: ignore[arg-type]

        manifest._contents = contents  # type: ignore[assignment]
        return train(small_run(tmp_path, max_steps=4000, stop_seconds=0.01)).exit_code

    child = forked(slow)
    until(lambda: steps_told(tmp_path) >= 2)
    os.kill(child, signal.SIGTERM)
    assert ended(child) == 75
    assert Store(tmp_path).newest() is None


@pytest.mark.parametrize("means", ["signal", "file"])
def test_a_checkpoint_on_demand_changes_nothing(tmp_path: Path, means: str) -> None:
    """F17."""
    whole = train(small_run(tmp_path / "whole", max_steps=40))
    child = trains(tmp_path / "run", max_steps=40)
    until(lambda: steps_told(tmp_path / "run") >= 2)
    if means == "signal":
        os.kill(child, signal.SIGUSR1)
    else:
        (tmp_path / "run" / TRIGGER).touch()
    assert ended(child) == 0
    kept = [event["step"] for event in events(tmp_path / "run", "saved")]
    assert len(kept) == 2
    assert 2 <= kept[0] < kept[1] == 40
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert not (tmp_path / "run" / TRIGGER).exists()
    assert whole.step == 40


def test_two_trainers_on_one_folder(tmp_path: Path) -> None:
    """F13."""
    from snugfit.errors import UsageError

    child = trains(tmp_path, max_steps=4000)
    until(lambda: steps_told(tmp_path) >= 1)
    with pytest.raises(UsageError, match=str(child)):
        train(small_run(tmp_path))
    os.kill(child, signal.SIGKILL)
    ended(child)
    assert train(small_run(tmp_path)).outcome == "finished", "a dead process holds nothing"


def test_workers_end_with_the_run(tmp_path: Path) -> None:
    """F30: the loader's processes go when the run is killed."""
    import psutil

    child = trains(tmp_path, recipe="workers", max_steps=4000)
    until(lambda: steps_told(tmp_path) >= 1)
    workers = psutil.Process(child).children(recursive=True)
    assert workers
    os.kill(child, signal.SIGKILL)
    ended(child)
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
