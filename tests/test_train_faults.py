"""`snugfit train` with faults of the machine: its streams, its clock, its home, its memory.

The tests run the real command: `main` in a process forked from a clean one, with its own descriptors and
limits. Settings that modules read at import cannot change in a fork, so these tests start a process of
their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import pty
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from clean_forks import Forks
from small_home import write_home
from small_runs import (
    CPU,
    Killed,
    assert_same_weights,
    bert_job,
    events,
    killed_after,
    killed_in,
    losses,
    small_run,
)
from snugfit.cli.main import main as the_command
from snugfit.errors import OutOfMemory
from snugfit.frontends.next_recipe import next_recipe
from snugfit.step import plain_loop
from snugfit.training.checkpoint.store import Store
from snugfit.training.journal import JOURNAL, Event, Journal
from snugfit.training.run.train import train
from test_training_kills import steps_told, until
from tiers import slow_but

pytestmark = [pytest.mark.whole, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")]

STDOUT, STDERR = 1, 2


def warm() -> None:
    """Import the modules that forked children need, in the clean process."""
    with tempfile.TemporaryDirectory() as folder:
        train(small_run(Path(folder)))
    for name in ("snugfit.cli.request", "snugfit.frontends.own", "snugfit.report.watching"):
        importlib.import_module(name)


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_home(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*words: str) -> int:
    """Run the command."""
    sys.argv = ["snugfit", *words]
    the_command()
    raise AssertionError("main does not come back")


def read_by_nobody() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


def full() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("streams", slow_but([[STDOUT, STDERR], [STDOUT], [STDERR]], 1), ids=str)
@pytest.mark.parametrize(
    "how", slow_but([read_by_nobody, lambda: None, full], 2), ids=["no reader", "closed", "full"]
)
def test_a_run_does_not_end_with_its_readers(
    at_home: Path, forks: Forks, how: Callable[[], int | None], streams: list[int]
) -> None:
    """The streams are a pipe without a reader, a log on a full disk, or no stream at all."""
    child = forks.start(command, "train", "job.yaml", streams={stream: how() for stream in streams})
    assert forks.ended(child) == 0
    assert steps_told(at_home / "out") == 12
    found = Store(at_home / "out").newest()
    assert found
    assert found.step == 12


@pytest.mark.parametrize("how", slow_but([read_by_nobody, full], 1), ids=["no reader", "full"])
def test_a_stopped_run_says_so_to_whoever_started_it(
    at_home: Path, forks: Forks, how: Callable[[], int]
) -> None:
    """A scheduler treats exit code 0 as finished work."""
    gone = how()
    words = ("train", "job.yaml", "--max-steps", "4000")
    child = forks.start(command, *words, streams={STDOUT: gone, STDERR: gone})
    until(lambda: steps_told(at_home / "out") >= 1)
    os.kill(child, signal.SIGTERM)
    assert forks.ended(child) == 75


def test_what_was_asked_for_and_cannot_be_written_is_told(forks: Forks) -> None:
    read, write = os.pipe()
    child = forks.start(command, "gpus", "--json", streams={STDOUT: full(), STDERR: write})
    os.close(write)
    with open(read) as told:
        assert told.read() == (
            "snugfit: The output cannot be written: No space left on device. "
            "Free space, or write it elsewhere.\n"
        )
    assert forks.ended(child) == 1


def test_a_terminal_that_changes_its_size(at_home: Path, forks: Forks) -> None:
    """One of the sizes is zero."""
    ours, theirs = pty.openpty()
    words = ("train", "job.yaml", "--max-steps", "20")
    child = forks.start(command, *words, streams={STDOUT: theirs, STDERR: theirs})
    os.close(theirs)
    shown, sizes = b"", [(0, 0), (1, 1), (3, 200), (50, 7), (24, 80)]
    with contextlib.suppress(OSError):  # the error of a closed terminal
        while part := os.read(ours, 4096):
            shown += part
            sizes.append(sizes.pop(0))
            fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", *sizes[0], 0, 0))
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGWINCH)
    os.close(ours)
    assert forks.ended(child) == 0
    assert b"finished after step 20" in shown


def nowhere() -> dict[str, str]:
    """Return an environment whose home is not writable."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HOME", "XDG", "HF_"))}
    return {**kept, "HOME": "/proc/none"}


def test_without_a_home(at_home: Path, forks: Forks) -> None:
    with open("printed", "w+") as printed:
        child = forks.start(
            command, "train", "job.yaml", streams={STDOUT: printed.fileno()}, environment=nowhere()
        )
        assert forks.ended(child) == 0
        printed.seek(0)
        assert printed.read() == f"finished after step 12: {at_home / 'out'}\n"


@pytest.mark.slow
def test_without_a_home_in_a_fresh_process(at_home: Path) -> None:
    """Modules read the home at import."""
    words = [sys.executable, "-m", "snugfit", "train", "job.yaml"]
    done = subprocess.run(words, env=nowhere(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"finished after step 12: {at_home / 'out'}\n"), done.stderr


def test_a_clock_that_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, speeds and the choice of the newest checkpoint do not depend on the date."""
    whole = train(small_run(tmp_path / "whole"))
    real, by = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + by[0])

    def watch(event: Event) -> None:
        if event["event"] == "step":
            by[0] = -4e8 if event["step"] % 2 else 4e8
            if event["step"] == 9:
                raise Killed

    with pytest.raises(Killed):
        train(small_run(tmp_path / "run", save_steps=4), watch=watch)
    os.utime(tmp_path / "run" / "checkpoint-8", (0, 0))
    done = train(small_run(tmp_path / "run", save_steps=4))
    assert events(tmp_path / "run", "started")[1]["resumed_from"] == 8
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert_same_weights(done.model, whole.model)
    assert all(0 < event["seconds"] < 600 for event in events(tmp_path / "run", "step"))


def test_a_journal_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning appears, and nothing else changes."""
    monkeypatch.setattr(
        "snugfit.training.journal.open_journal",
        lambda path: open("/dev/full", "a+b"),  # noqa: SIM115 - the caller closes it
    )
    told: list[Event] = []
    done = train(small_run(tmp_path / "run"), watch=told.append)
    (warning,) = [event["text"] for event in told if event["event"] == "warning"]
    assert f"{JOURNAL} cannot be written (No space left on device)" in warning
    assert len([event for event in told if event["event"] == "step"]) == 12
    assert_same_weights(done.model, train(small_run(tmp_path / "whole")).model)


def test_a_journal_that_is_a_link_leads_nowhere(tmp_path: Path) -> None:
    victim, told = tmp_path / "victim", list[Event]()
    victim.write_text("mine")
    (tmp_path / JOURNAL).symlink_to(victim)
    journal = Journal(tmp_path, told.append)
    journal.tell("step", step=1)
    journal.tell("step", step=2)
    assert victim.read_text() == "mine"
    (warning,) = [event["text"] for event in told if event["event"] == "warning"]
    assert f"{JOURNAL} cannot be written (it is a symbolic link, which is not followed)" in warning


DAMAGES = {
    "empty": b"",
    "half a line": b'{"event": "st',
    "not valid text": b"\xff\xfe\x00\n[1]\n7\n",
    "zeros": b"\0" * 5000,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_journal_loses_no_run(tmp_path: Path, damage: bytes) -> None:
    """A run resumes from its checkpoints, and appends to the journal on a new line."""
    killed_in(small_run(tmp_path, save_steps=4), 6)
    (tmp_path / JOURNAL).write_bytes(damage)
    assert train(small_run(tmp_path, save_steps=4)).outcome == "finished"
    (started,) = events(tmp_path, "started")
    assert started["resumed_from"] == 4
    assert sorted(losses(tmp_path)) == list(range(5, 13))


@pytest.mark.slow
def test_several_runs_that_were_interrupted_go_on_where_they_stopped(tmp_path: Path) -> None:
    """After a restart, finished runs take no step, and the broken run takes its remaining steps."""
    recipes = ("plain", "micro_batches(2)", "sgd")

    def all_of_them(breaks_at: int) -> None:
        for recipe in recipes:
            watch = killed_after(breaks_at) if recipe == recipes[1] else lambda event: None
            train(small_run(tmp_path / recipe, recipe, save_steps=4), watch=watch)

    with pytest.raises(Killed):
        all_of_them(breaks_at=6)
    assert not (tmp_path / "sgd").exists()
    all_of_them(breaks_at=99)
    taken = [[event["step"] for event in events(tmp_path / recipe, "step")] for recipe in recipes]
    assert taken == [[*range(1, 13)], [*range(1, 7), *range(5, 13)], [*range(1, 13)]]


@pytest.mark.parametrize("enough", [2, 0])
def test_memory_of_the_host_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enough: int) -> None:
    """The system refuses an allocation of a forward pass. The run repeats the step in finer pieces. If
    these do not fit either, it ends with a memory error."""
    plain = plain_loop._loss

    def greedy(model: Any, batch: Any) -> Any:
        if len(batch["input_ids"]) > enough:
            torch.empty(1 << 50, dtype=torch.uint8)  # more than there is anywhere
        return plain(model, batch)

    monkeypatch.setattr(plain_loop, "_loss", greedy)
    run = small_run(tmp_path, job=bert_job(8), max_steps=2)
    if not enough:
        with pytest.raises(OutOfMemory, match="There is no other recipe to try"):
            train(run, replan=next_recipe(CPU))
    else:
        assert train(run, replan=next_recipe(CPU)).step == 2
    replanned = events(tmp_path, "replanned")
    assert [event["recipe"] for event in replanned][:2] == ["micro_batches(2)", "micro_batches(4)"]
    assert {event["cause"] for event in replanned} == {"host-oom"}


def test_without_another_thread_a_checkpoint_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits on memory or processes can prevent a thread."""

    def refuse(self: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", refuse)
        done = train(small_run(tmp_path / "run", save_steps=5))
    assert [event["step"] for event in events(tmp_path / "run", "saved")] == [5, 10, 12]
    assert_same_weights(done.model, train(small_run(tmp_path / "whole")).model)


def test_a_worker_that_the_system_kills(tmp_path: Path) -> None:
    """The error names the most common cause, and the next start resumes."""
    before = psutil.Process().children()

    def watch(event: Event) -> None:
        if event["event"] == "step" and event["step"] == 3:
            for worker in psutil.Process().children():
                if worker not in before:
                    worker.kill()

    with pytest.raises(OutOfMemory, match=r"loader has ended \(signal: Killed\)"):
        train(small_run(tmp_path / "run", "workers", save_steps=1), watch=watch)
    done = train(small_run(tmp_path / "run", "workers"))
    assert events(tmp_path / "run", "started")[1]["resumed_from"] >= 2
    assert_same_weights(done.model, train(small_run(tmp_path / "whole")).model)
