"""torch's lock of a C++ extension: a dead lock is removed, and a live one is waited for with a message."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from clean_forks import Forks, forks_of
from ends_of_forks import compiles, end, until
from snugfit.features.distributed.engine import build_lock
from snugfit.features.distributed.engine.build_lock import LockWait, dead_locks_removed, remove_if_dead
from snugfit.step.applier import engine_context
from snugfit.techniques.recipe import Recipe

MANY = 4
"""Number of processes that start at the same time."""

SOURCE = 'extern "C" int answer() { return 42; }\n'


def forks() -> Forks:
    return forks_of("test_build_lock")


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """Return a lock file that no process holds, in a folder whose last change is old."""
    file = tmp_path / "cpu_adam" / "lock"
    file.parent.mkdir()
    file.touch()
    age(file)
    return file


def age(lock: Path) -> None:
    """Set the change time of all files in the lock's folder to an hour ago."""
    for path in (*lock.parent.iterdir(), lock.parent):
        os.utime(path, (time.time() - 3600,) * 2)


@pytest.fixture
def child() -> Iterator[Callable[..., int]]:
    """Start a process by a function of this module, and kill it at the end of the test."""
    started: list[int] = []

    def start(work: Callable[..., int], *arguments: str) -> int:
        started.append(forks().start(work, *arguments))
        return started[-1]

    yield start
    for pid in started:
        end(forks, pid)


def test_a_dead_lock_is_removed_and_the_build_is_ours(lock: Path) -> None:
    told: list[str] = []
    with dead_locks_removed(told.append):
        baton = FileBaton(str(lock))
        assert baton.try_acquire(), "torch would load a missing extension if this were False"
        assert lock.exists()
        baton.release()
    (line,) = told
    assert "killed while it built cpu_adam" in line
    assert str(lock) in line
    assert FileBaton.try_acquire.__qualname__ == "FileBaton.try_acquire"


def test_a_free_lock_costs_no_wait(lock: Path) -> None:
    lock.unlink()
    told: list[str] = []
    with dead_locks_removed(told.append):
        baton = FileBaton(str(lock))
        assert baton.try_acquire()
        baton.release()
    assert not told


def test_a_lock_that_changes_beside_is_left(lock: Path) -> None:
    (lock.parent / "build.ninja").touch()
    assert "still change" in (remove_if_dead(lock) or "")
    assert lock.exists()
    age(lock)
    assert remove_if_dead(lock) is None
    assert not lock.exists()
    assert remove_if_dead(lock) == "", "the lock is already free"


UNSEEN = {
    "another user": ("os.geteuid", lambda: 12345, "is user"),
    "another machine": (f"{build_lock.__name__}._file_system", lambda path: "nfs4", "nfs4"),
    "another container": ("os.readlink", lambda path: "pid:[4026539999]", "containers"),
}


@pytest.mark.parametrize("case", UNSEEN)
def test_a_lock_whose_holder_may_be_unseen_is_left_and_named(
    lock: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    name, answer, reason = UNSEEN[case]
    monkeypatch.setattr(name, answer)
    if case == "another container":  # its folder is a mounted volume
        real = os.stat
        monkeypatch.setattr("os.stat", lambda path, **more: real("/proc" if path == "/" else path, **more))
    told: list[str] = []
    wait = LockWait(lock, told.append)
    wait.look()
    assert not told, "a short wait gives no message"
    wait._began -= 10
    wait.look()
    wait.look()
    (line,) = told
    assert str(lock) in line
    assert reason in line
    assert "delete that file" in line
    assert lock.exists()


def test_the_line_comes_within_ten_seconds() -> None:
    assert build_lock.SECONDS_TO_LINE + 2 * build_lock.POLL_SECONDS < 10


def hold(lock: str) -> int:
    baton = FileBaton(lock)
    assert baton.try_acquire()
    time.sleep(60)
    return 0


def work_in(folder: str) -> int:
    """Stay in the folder as working directory, like ninja, whose parent may be dead."""
    os.chdir(folder)
    time.sleep(60)
    return 0


@pytest.mark.whole
@pytest.mark.parametrize("work", [hold, work_in])
def test_a_live_builder_is_waited_for_by_name(
    lock: Path, child: Callable[..., int], work: Callable[..., int]
) -> None:
    if work is hold:
        lock.unlink()
    pid = child(work, str(lock if work is hold else lock.parent))
    until(lambda: lock.exists() and bool(build_lock.builders_at(lock)))
    age(lock)
    assert f"Waiting for process {pid}, which builds cpu_adam in {lock.parent}" in (
        remove_if_dead(lock) or ""
    )
    assert lock.exists()
    end(forks, pid)
    assert lock.exists()
    assert remove_if_dead(lock) is None


def take_turns(lock: str, log: str) -> int:
    """Take the lock of torch, hold it for a while like a build, and release it."""
    with dead_locks_removed(lambda text: None):
        baton = FileBaton(lock)
        assert baton.try_acquire()
        for word in ("begin", "end"):
            with open(log, "a", encoding="utf-8") as file:
                file.write(f"{word} {os.getpid()}\n")
            time.sleep(0.1)
        baton.release()
    return 0


@pytest.mark.whole
@pytest.mark.slow
def test_of_many_that_find_it_dead_one_builds_at_a_time(lock: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    pids = [forks().start(take_turns, str(lock), str(log)) for _ in range(MANY)]
    assert [forks().ended(pid, 30) for pid in pids] == [0] * MANY
    lines = [line.split() for line in log.read_text().splitlines()]
    assert len(lines) == 2 * MANY
    assert [word for word, _ in lines] == ["begin", "end"] * MANY
    assert all(lines[at][1] == lines[at + 1][1] for at in range(0, 2 * MANY, 2))
    assert not lock.exists()


def build(folder: str) -> int:
    """Build a tiny extension with torch's own build."""
    cpp_extension.load(
        "answer", [f"{folder}/answer.cpp"], build_directory=folder, with_cuda=False, is_python_module=False
    )
    return 0


@compiles
@pytest.mark.whole
def test_a_build_that_is_killed_is_built_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: Callable[..., int]
) -> None:
    """SIGKILL ends Python while ninja and the compiler continue; the next start waits for them and names
    them."""
    import ctypes

    (tmp_path / "answer.cpp").write_text(SOURCE)
    slow, started = tmp_path / "slow-g++", tmp_path / "started"
    slow.write_text(
        f'#!/bin/sh\nfor a in "$@"; do [ "$a" = -c ] && touch {started} && sleep 1; done\nexec g++ "$@"\n'
    )
    slow.chmod(slow.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("TORCH_DONT_CHECK_COMPILER_ABI", "1")
    monkeypatch.setenv("CXX", str(slow))
    pid = child(build, str(tmp_path))
    until(started.exists, 30)
    end(forks, pid)
    monkeypatch.setattr(build_lock, "SECONDS_TO_LINE", 0.0)
    monkeypatch.setattr(build_lock, "QUIET_SECONDS", 0.2)
    monkeypatch.setattr(build_lock, "POLL_SECONDS", 0.1)
    told: list[str] = []
    with dead_locks_removed(told.append):
        build(str(tmp_path))
    assert "Waiting for process" in told[0]
    assert "is removed" in told[-1]
    assert ctypes.CDLL(str(tmp_path / "answer.so")).answer() == 42


@pytest.mark.whole
def test_a_run_with_an_engine_is_told_of_it(lock: Path) -> None:
    pytest.importorskip("deepspeed")
    told: list[str] = []
    setup = Recipe.parse("zero2").setup()
    with engine_context(setup, torch.device("cpu"), told.append):
        assert FileBaton(str(lock)).try_acquire()
    assert "is removed" in told[0]
