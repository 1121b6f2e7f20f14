"""One trainer a folder.

The kernel decides: `flock` on a file `.lock`, which it takes back however the holder dies. In the file stands
one line of JSON about the holder, so that a second trainer can say whom it met. The file is never deleted:
who deletes a lock's file may delete the one that somebody else has just locked.

A lock of this kind belongs to the open file and not to the process, so a process forked by the holder (a
loader's worker) would hold it on after the holder's death. Python tells us of each fork, and the child closes
its copy; a program that is executed gets none.

Where the file system knows no such lock, the line decides: its writer is alive when a process of that number
runs, and began when the line says, in seconds since this machine's start (so that no change of the clock and
no reused number is mistaken for it). Who reads and rewrites the line then holds a folder `.lock.guard`,
because making a folder either succeeds or finds it there on every file system. Of a holder on another machine
only the user can know whether it is alive.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from snugfit.documents import BadDocument, read_document
from snugfit.errors import UsageError

LOCK, GUARD = ".lock", ".lock.guard"

GRACE_SECONDS = 2.0
"""How long a lock whose holder is dead or not yet named is asked for again, and how long a guard may stand,
which is held for milliseconds. A choice."""

PAUSE_SECONDS = 0.02
"""Between two tries. A choice."""

LONGEST_LINE = 4096

_NO_FLOCK = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
_held: set[int] = set()


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds, or held, a folder."""

    pid: int
    """The process's number."""

    started: float
    """Seconds from the machine's start to the process's."""

    boot: str
    """The kernel's name for this start of the machine; empty where it gives none."""

    host: str
    """The machine's name."""

    since: str
    """The date and time of locking, in UTC."""

    @classmethod
    def ourselves(cls) -> Self:
        """This process, now."""
        return cls(
            pid=os.getpid(),
            started=_started(os.getpid()) or 0.0,
            boot=_boot(),
            host=socket.gethostname(),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    @property
    def alive(self) -> bool | None:
        """Whether the process still runs; None when it ran on another machine."""
        if self.host != socket.gethostname():
            return None
        started = _started(self.pid) if self.boot == _boot() else None
        return started is not None and abs(started - self.started) < 1

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def _started(pid: int) -> float | None:
    """Seconds from the machine's start to the process's; None when it does not run (any more)."""
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return None
        return process.create_time() - psutil.boot_time()
    except psutil.NoSuchProcess:
        return None


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


@contextmanager
def locked(root: Path) -> Iterator[str]:
    """Holds the folder for this process alone; gives a note about a holder that was killed, or an empty text.

    Raises `UsageError` when another trainer writes there, or nobody can.
    """
    path, ourselves = root.absolute() / LOCK, Holder.ourselves()
    _close_after_fork()
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        _held.add(descriptor)
        try:
            before = _take(descriptor, path, ourselves)
        except BaseException:
            _release(descriptor)
            raise
    except OSError as refusal:
        raise UsageError(f"{path} cannot be locked: {refusal.strerror}. Name another folder.") from None
    try:
        yield f"The trainer that wrote here before did not end by itself: {before}." if before else ""
    finally:
        if os.getpid() == ourselves.pid:  # a forked child that leaves this block has nothing to give back
            with suppress(OSError):
                if _read(path) == ourselves:
                    _write(path, None)
            _release(descriptor)


def _release(descriptor: int) -> None:
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    _held.discard(descriptor)
    os.close(descriptor)


@functools.cache
def _close_after_fork() -> None:
    def close() -> None:
        for descriptor in _held:
            with suppress(OSError):
                os.close(descriptor)
        _held.clear()

    os.register_at_fork(after_in_child=close)


def _take(descriptor: int, path: Path, ourselves: Holder) -> Holder | None:
    """Takes the lock; gives the holder before, if it did not live to give it back."""
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read(path)
            if holder is not None and holder.alive is not False:
                raise _refused(path, holder) from None
            if time.monotonic() > deadline:
                raise _left_behind(path, holder) from None
            time.sleep(PAUSE_SECONDS)
            continue
        except OSError as refusal:
            if refusal.errno not in _NO_FLOCK:
                raise
            return _taken_by_line(path, ourselves)
        before = _read(path)
        if before is not None and before.alive and before.pid != ourselves.pid:
            raise _refused(path, before)  # it holds the folder by its line, without the kernel's lock
        with suppress(OSError):  # a full disk: the lock holds without its line
            _write(path, ourselves)
        return before


def _taken_by_line(path: Path, ourselves: Holder) -> Holder | None:
    with _guarded(path):
        before = _read(path)
        if before is not None and before.alive is not False:
            raise _refused(path, before)
        _write(path, ourselves)
    return before


@contextmanager
def _guarded(path: Path) -> Iterator[None]:
    guard = path.with_name(GUARD)
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        try:
            guard.mkdir()
            break
        except FileExistsError:
            if time.monotonic() > deadline:  # whoever made it was killed
                guard.rmdir()
            time.sleep(PAUSE_SECONDS)
    try:
        yield
    finally:
        guard.rmdir()


def _read(path: Path) -> Holder | None:
    """Whom the line names; None for no line, half a line, or one that is not ours."""
    try:
        line = read_document(path, limit=LONGEST_LINE)
    except (BadDocument, FileNotFoundError):
        return None
    match line:
        case {"pid": int(), "started": float(), "boot": str(), "host": str(), "since": str()}:
            return Holder(**line) if line["pid"] > 0 and len(line) == 5 else None
    return None


def _write(path: Path, holder: Holder | None) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(asdict(holder)) + "\n" if holder else "")


def _refused(path: Path, holder: Holder) -> UsageError:
    freed = f" If it runs there no more, delete {path}." if holder.alive is None else ""
    return UsageError(
        f"{path.parent}: another trainer writes there, {holder}. End it, or name another folder.{freed}"
    )


def _left_behind(path: Path, holder: Holder | None) -> UsageError:
    whose = f"{holder} is dead, but a process that it left behind" if holder else "a process without a name"
    return UsageError(
        f"{path.parent}: {whose} still holds {path}. End it (`fuser {path}` shows it), or name another"
        " folder."
    )
