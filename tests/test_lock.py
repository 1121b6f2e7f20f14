"""One trainer per folder: a second one is refused with the first one's identity; a dead one's lock is taken
over."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from snugfit.errors import UsageError
from snugfit.training.checkpoint import lock
from snugfit.training.checkpoint.lock import GUARD, LOCK, Holder, hold_folder
from stored import in_child
from tiers import slow_but

MANY = 4
"""Number of processes that start at once."""


@pytest.fixture(params=["flock", "no flock"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs on both kinds of file system."""
    if request.param == "no flock":
        without_flock(monkeypatch, errno.ENOLCK)
    return str(request.param)


def without_flock(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)


@contextmanager
def another(root: Path, then: Callable[[], object] = lambda: None) -> Iterator[int]:
    """Yield the process id of a child that locks the folder, calls `then`, and waits for a kill."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        with hold_folder(root):
            then()
            os.write(tell, b".")
            os.close(tell)
            time.sleep(60)
        os._exit(0)
    os.close(tell)
    try:
        assert os.read(told, 1) == b"."
        yield child
    finally:
        os.close(told)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def line(root: Path) -> dict[str, object]:
    held: dict[str, object] = json.loads((root / LOCK).read_text())
    return held


def test_a_folder_is_held_and_given_back(tmp_path: Path) -> None:
    for _ in range(3):
        with hold_folder(tmp_path):
            assert line(tmp_path)["pid"] == os.getpid()
        assert (tmp_path / LOCK).read_text() == ""
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


@pytest.mark.whole
def test_a_second_trainer_is_refused_and_told_whom_it_met(tmp_path: Path) -> None:
    with another(tmp_path) as pid:
        with pytest.raises(UsageError) as told, hold_folder(tmp_path):
            pass
        since = line(tmp_path)["since"]
        assert told.value.exit_code == 2
        for named in (str(tmp_path), f"process {pid} on {socket.gethostname()}", f"since {since}"):
            assert named in str(told.value)
        assert line(tmp_path)["pid"] == pid
    with hold_folder(tmp_path):
        assert line(tmp_path)["pid"] == os.getpid()


@pytest.mark.whole
def test_a_second_time_in_the_same_process_is_refused(tmp_path: Path) -> None:
    with hold_folder(tmp_path):
        with pytest.raises(UsageError, match=f"process {os.getpid()} "), hold_folder(tmp_path):
            pass
        assert line(tmp_path)["pid"] == os.getpid()
        assert in_child(lambda: refused(tmp_path)) == 0


def refused(root: Path) -> None:
    with pytest.raises(UsageError, match="another training run"), hold_folder(root):
        pass


def test_a_fault_inside_gives_the_folder_back(tmp_path: Path) -> None:
    with pytest.raises(KeyError), hold_folder(tmp_path):
        raise KeyError
    with hold_folder(tmp_path):
        assert line(tmp_path)["pid"] == os.getpid()


@pytest.mark.whole
def test_killed_trainers_are_followed_by_the_next(tmp_path: Path) -> None:
    for _ in range(2):
        with another(tmp_path) as pid:
            pass
        assert line(tmp_path)["pid"] == pid
    with hold_folder(tmp_path):
        assert line(tmp_path)["pid"] == os.getpid()
    with hold_folder(tmp_path):
        assert line(tmp_path)["pid"] == os.getpid()


@pytest.mark.whole
def test_a_dead_trainer_that_nobody_has_waited_for(tmp_path: Path) -> None:
    """A zombie process holds no lock."""
    with another(tmp_path) as pid:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with hold_folder(tmp_path):
            assert line(tmp_path)["pid"] == os.getpid()


@pytest.mark.whole
@pytest.mark.parametrize("fork", ["os.fork", "multiprocessing"])
def test_a_worker_that_outlives_its_trainer_holds_nothing(tmp_path: Path, fork: str) -> None:
    """Children inherit a lock of this kind. Without precautions, a loader's worker would keep the folder
    locked."""
    alive, end = os.pipe()

    def work() -> None:
        os.read(alive, 1)  # until the test ends
        os._exit(0)

    def begin() -> None:
        os.close(end)
        if fork == "os.fork":
            if os.fork() == 0:
                work()
        else:
            import multiprocessing

            multiprocessing.get_context("fork").Process(target=work).start()

    with another(tmp_path, then=begin) as pid:
        (worker,) = psutil.Process(pid).children()
        assert in_child(lambda: refused(tmp_path)) == 0
    with hold_folder(tmp_path):
        assert line(tmp_path)["pid"] == os.getpid()
    assert worker.is_running()
    os.close(end)
    os.close(alive)


@pytest.mark.whole
def test_a_forked_child_that_leaves_the_block_gives_nothing_back(tmp_path: Path) -> None:
    held = hold_folder(tmp_path)
    held.__enter__()
    mine = line(tmp_path)
    assert in_child(lambda: held.__exit__(None, None, None) and None) == 0
    assert line(tmp_path) == mine
    assert in_child(lambda: refused(tmp_path)) == 0
    held.__exit__(None, None, None)
    with hold_folder(tmp_path):
        assert line(tmp_path)["pid"] == os.getpid()


@pytest.mark.whole
@pytest.mark.parametrize("stale", slow_but([True, False], 1), ids=["after a kill", "free"])
def test_of_many_that_begin_at_once_one_gets_in(tmp_path: Path, stale: bool) -> None:
    if stale:
        with another(tmp_path):
            pass
    start, go = os.pipe()
    answers, answer = os.pipe()

    def begin() -> None:
        os.close(go)
        os.read(start, 1)
        try:
            with hold_folder(tmp_path):
                os.write(answer, b"!")
                time.sleep(60)
        except UsageError:
            os.write(answer, b"?")

    children = []
    for _ in range(MANY):
        children.append(os.fork())
        if children[-1] == 0:
            in_the_end(begin)
    os.write(go, b"." * MANY)
    said = b"".join(os.read(answers, 1) for _ in children)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for descriptor in (start, go, answers, answer):
        os.close(descriptor)
    assert sorted(said) == sorted(b"!" + b"?" * (MANY - 1))


def in_the_end(act: Callable[[], None]) -> None:
    """Call `act` and end this process in any case."""
    try:
        act()
    finally:
        os._exit(0)


def left(root: Path, **changes: object) -> None:
    """Write the lock line of a living process, our parent, that does not hold the kernel's lock."""
    parent = psutil.Process(os.getppid())
    started = parent.create_time() - psutil.boot_time()
    held = {**vars(Holder.current()), "pid": parent.pid, "started": started, **changes}
    (root / LOCK).write_text(json.dumps(held) + "\n")


@pytest.mark.parametrize(
    "changes",
    [{"pid": 2**22 + 1}, {"started": 1.5}, {"boot": "another start of the machine"}],
    ids=["no such process", "a number used again", "the machine started again"],
)
def test_what_a_dead_trainer_left_is_taken(tmp_path: Path, changes: dict[str, object]) -> None:
    left(tmp_path, **changes)
    with hold_folder(tmp_path):
        assert line(tmp_path)["pid"] == os.getpid()


def test_a_living_trainer_is_believed_whichever_lock_it_has(tmp_path: Path) -> None:
    left(tmp_path)
    with pytest.raises(UsageError, match=f"process {os.getppid()} "), hold_folder(tmp_path):
        pass


@pytest.mark.whole
def test_a_clock_that_jumps_kills_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock change moves the machine's start time and a process's start time alike."""
    system = psutil._psplatform
    with another(tmp_path):
        real = system.boot_time
        monkeypatch.setattr(system, "boot_time", lambda: real() + 7200.0)
        refused(tmp_path)


def test_a_trainer_of_another_machine(tmp_path: Path, kind: str) -> None:
    """The kernel's lock detects it; without that lock only the user can decide."""
    left(tmp_path, host="elsewhere")
    if kind == "flock":
        with hold_folder(tmp_path):
            assert line(tmp_path)["pid"] == os.getpid()
    else:
        with (
            pytest.raises(UsageError, match=f"no longer running there, delete {tmp_path / LOCK}"),
            hold_folder(tmp_path),
        ):
            pass


@pytest.mark.parametrize(
    "text",
    ["", "{", "{}", "[]", "null", '{"pid": "1"}', "\0" * 99, '{"pid": -1, "started": 1.0}', "x" * 9999],
)
def test_half_a_line_is_nobodys(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK).write_text(text)
    with hold_folder(tmp_path):
        assert line(tmp_path)["pid"] == os.getpid()


def test_a_folder_where_nobody_can_lock(tmp_path: Path) -> None:
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / LOCK).symlink_to(tmp_path / "mine")
    for folder in (tmp_path / "nowhere", tmp_path / "link"):
        with pytest.raises(UsageError, match=r"lock cannot be locked: "), hold_folder(folder):
            pass
    assert not (tmp_path / "mine").exists()


@pytest.mark.whole
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL])
def test_answers_of_a_file_system_without_such_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    without_flock(monkeypatch, number)
    with another(tmp_path):
        refused(tmp_path)
    with hold_folder(tmp_path):
        assert line(tmp_path)["pid"] == os.getpid()


def test_any_other_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_flock(monkeypatch, errno.EIO)
    with pytest.raises(UsageError, match="cannot be locked: Input/output error"), hold_folder(tmp_path):
        pass


def test_a_guard_that_a_killed_process_left(tmp_path: Path, kind: str) -> None:
    (tmp_path / GUARD).write_text(f"{2**22 + 1}\n{socket.gethostname()}\n")
    with hold_folder(tmp_path):
        assert line(tmp_path)["pid"] == os.getpid()
    assert (tmp_path / GUARD).exists() == (kind == "flock")


def test_a_full_disk_takes_the_line_and_not_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lock, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(lock, "_write", refuse)
    if kind == "flock":
        with hold_folder(tmp_path):
            with (
                pytest.raises(UsageError, match="a process without a name still uses"),
                hold_folder(tmp_path),
            ):
                pass
    else:
        with pytest.raises(UsageError, match="No space left on device"), hold_folder(tmp_path):
            pass


def test_a_lock_that_a_foreign_process_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A process forked without Python's fork hooks keeps its copy of the lock's file open.

    On a file system without `flock`, no lock remains.
    """
    monkeypatch.setattr(lock, "GRACE_SECONDS", 0.05)
    left(tmp_path, pid=2**22 + 1)
    descriptor = os.open(tmp_path / LOCK, os.O_RDWR)
    if kind == "flock":
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match=r"has ended, but a process that it started still uses"):
            with hold_folder(tmp_path):
                pass
    os.close(descriptor)
    with hold_folder(tmp_path):
        assert line(tmp_path)["pid"] == os.getpid()
