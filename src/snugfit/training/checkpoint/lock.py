"""A lock that allows only one process at a time to train in a folder.

`filelock` takes the kernel's lock on a file `.lock`. The kernel releases it when the process ends for any
reason. A process that the holder forks (a data loader worker) does not inherit it. The file has one line of
JSON about the holder, which a second process shows in its error.

On a file system without such locks, the line itself is the lock. The process that wrote it is alive if a
process with its number runs and started at the recorded time. The time is in seconds since this machine's
start: it is independent of changes of the clock and distinguishes a reused number. A process that rewrites
the line first creates the file `.lock.guard`, which works as a lock on every file system. A holder on another
machine cannot be checked: the user has to do this.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from filelock import FileLock, SoftFileLock, Timeout

from snugfit.documents import BadDocument, read_document
from snugfit.errors import UsageError

LOCK, GUARD = ".lock", ".lock.guard"

GRACE_SECONDS = 2.0
"""Seconds to wait for the folder's lock if its holder is dead or has not written its name yet (chosen)."""

POLL_SECONDS = 0.02
"""Seconds between two attempts to take the folder's lock (chosen)."""

LONGEST_LINE = 4096

_NO_FLOCK = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that locked a folder of checkpoints."""

    pid: int
    """Id of the process that has the lock."""

    started: float
    """Start time of the process, in seconds since the machine's start."""

    boot: str
    """Id that the kernel gives to each start of the machine; empty if it has none."""

    host: str
    """Name of the machine on which the process runs."""

    since: str
    """Date and time in UTC at which the process took the lock."""

    @classmethod
    def current(cls) -> Self:
        """Return the current process as a holder that takes the lock now."""
        return cls(
            pid=os.getpid(),
            started=_start_seconds(os.getpid()) or 0.0,
            boot=_boot_id(),
            host=socket.gethostname(),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    @property
    def alive(self) -> bool | None:
        """True if the process that holds the lock still runs; None for a process of another machine."""
        if self.host != socket.gethostname():
            return None
        # After a restart of the machine, another process may have the same number.
        started = _start_seconds(self.pid) if self.boot == _boot_id() else None
        # Another process may get the same number later, but it has another start time.
        return started is not None and abs(started - self.started) < 1

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def _start_seconds(pid: int) -> float | None:
    """Return the seconds from the machine's start to the start of the process; None if it does not run."""
    import psutil

    try:
        process = psutil.Process(pid)
        # A zombie process has ended, but its parent has not read the exit code.
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return None
        return process.create_time() - psutil.boot_time()
    except psutil.NoSuchProcess:
        return None


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


@contextmanager
def hold_folder(root: Path) -> Iterator[None]:
    """Lock the folder for this process within the context.

    Raises `UsageError` if another trainer writes there, or the folder cannot be locked.
    """
    path, current = root.absolute() / LOCK, Holder.current()
    lock = FileLock(path, poll_interval=POLL_SECONDS, thread_local=False, fallback_to_soft=False)
    try:
        _take(lock, path, current)
    except BaseException as fault:
        lock.release(force=True)
        if isinstance(fault, OSError):
            reason = fault.strerror or fault
            raise UsageError(f"{path} cannot be locked: {reason}. Name another folder.") from None
        raise
    try:
        yield
    finally:
        if os.getpid() == current.pid:  # a forked child must not release the lock
            with suppress(OSError):
                if _read(path) == current:
                    # The lock file is not removed. Otherwise, two processes could lock different files of
                    # this name.
                    _write(path, None)
            lock.release(force=True)


def _take(lock: FileLock, path: Path, current: Holder) -> None:
    """Acquire the kernel's file lock. On a file system without locks, check the process that the
    file names.
    """

    def holder_lives() -> bool:
        holder = _read(path)
        return holder is not None and holder.alive is not False

    path.parent.stat()  # filelock would create the folder,
    if path.is_symlink():  # and write to the target of a link
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    try:
        lock.acquire(timeout=GRACE_SECONDS, cancel_check=holder_lives)
    except Timeout:
        raise _owner_message(path, _read(path)) from None
    except OSError as refusal:
        if refusal.errno not in _NO_FLOCK:
            raise
        # If the kernel's lock is not supported, the guard file protects reading and writing the line.
        with SoftFileLock(path.with_name(GUARD), timeout=GRACE_SECONDS, poll_interval=POLL_SECONDS):
            if holder_lives():
                raise _owner_message(path, _read(path)) from None
            _write(path, current)
        return
    holder = _read(path)
    if holder is not None and holder.alive and holder.pid != current.pid:
        raise _owner_message(path, holder)  # its line in the file is the lock, without the kernel's
    with suppress(OSError):  # on a full disk, the lock has no line
        _write(path, current)


def _read(path: Path) -> Holder | None:
    """Return the holder that the lock file records; None for no line, half a line, or another program's."""
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


def _owner_message(path: Path, holder: Holder | None) -> UsageError:
    cure = "Stop it, or name another folder."
    if holder is not None and holder.alive is None:
        cure += f" If it is no longer running there, delete {path}."
    if holder is not None and holder.alive is not False:
        return UsageError(f"{path.parent}: another training run writes there, {holder}. {cure}")
    owner = f"{holder} has ended, but a process that it started" if holder else "a process without a name"
    return UsageError(
        f"{path.parent}: {owner} still uses {path}. Stop it (`fuser {path}` shows it), or "
        "name another folder."
    )
