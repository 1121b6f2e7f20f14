"""One trainer per folder.

`filelock` takes the kernel's lock on a file `.lock`: however the holder dies, the kernel frees it, and a
process forked by the holder (a loader's worker) does not inherit it. In the file stands one line of JSON
about the holder, so that a second trainer can say who is in its way.

Where the file system has no such lock, the line decides: its writer is alive when a process with that number
runs and began when the line says, in seconds since this machine's start (so that neither a change of the
clock nor a reused number is mistaken for it). Whoever reads and rewrites the line then holds `.lock.guard`, a
file that exists or does not on every file system. Whether a holder on another machine is alive, only the user
can know.
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
"""How long a lock whose holder is dead or not yet named, or a guard, is waited for. A choice."""

POLL_SECONDS = 0.02
"""Between two tries. A choice."""

LONGEST_LINE = 4096

_NO_FLOCK = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that holds, or held, a folder."""

    pid: int
    """The number of the process."""

    started: float
    """Seconds from the machine's start to the start of the process."""

    boot: str
    """The kernel's name for this start of the machine; empty where it gives none."""

    host: str
    """The name of the machine."""

    since: str
    """When it took the lock, as date and time in UTC."""

    @classmethod
    def current(cls) -> Self:
        """This process, as a holder from now on."""
        return cls(
            pid=os.getpid(),
            started=_start_seconds(os.getpid()) or 0.0,
            boot=_boot_id(),
            host=socket.gethostname(),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    @property
    def alive(self) -> bool | None:
        """Whether the process still runs; None when it ran on another machine."""
        if self.host != socket.gethostname():
            return None
        started = _start_seconds(self.pid) if self.boot == _boot_id() else None
        return started is not None and abs(started - self.started) < 1

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def _start_seconds(pid: int) -> float | None:
    """Seconds from the machine's start to the start of the process; None when it does not run (any more)."""
    import psutil

    try:
        process = psutil.Process(pid)
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
    """Holds the folder for this process alone.

    Raises `UsageError` when another trainer writes there, or the folder cannot be locked.
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
        if os.getpid() == current.pid:  # a forked child that leaves this block has nothing to give back
            with suppress(OSError):
                if _read(path) == current:
                    _write(path, None)
            lock.release(force=True)


def _take(lock: FileLock, path: Path, current: Holder) -> None:
    """Takes the kernel's lock; where the file system has none, the line decides."""

    def holder_lives() -> bool:
        holder = _read(path)
        return holder is not None and holder.alive is not False

    path.parent.stat()  # filelock would make the folder
    if path.is_symlink():  # and write to the target of a link
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    try:
        lock.acquire(timeout=GRACE_SECONDS, cancel_check=holder_lives)
    except Timeout:
        raise _held_by(path, _read(path)) from None
    except OSError as refusal:
        if refusal.errno not in _NO_FLOCK:
            raise
        with SoftFileLock(path.with_name(GUARD), timeout=GRACE_SECONDS, poll_interval=POLL_SECONDS):
            if holder_lives():
                raise _held_by(path, _read(path)) from None
            _write(path, current)
        return
    holder = _read(path)
    if holder is not None and holder.alive and holder.pid != current.pid:
        raise _held_by(path, holder)  # it holds the folder by its line, without the kernel's lock
    with suppress(OSError):  # a full disk: the lock holds without its line
        _write(path, current)


def _read(path: Path) -> Holder | None:
    """The holder that the line names; None for no line, half a line, or one that is not ours."""
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


def _held_by(path: Path, holder: Holder | None) -> UsageError:
    cure = "Stop it, or name another folder."
    if holder is not None and holder.alive is None:
        cure += f" If it is no longer running there, delete {path}."
    if holder is not None and holder.alive is not False:
        return UsageError(f"{path.parent}: another training run writes there, {holder}. {cure}")
    who = f"{holder} has ended, but a process that it started" if holder else "a process without a name"
    return UsageError(
        f"{path.parent}: {who} still uses {path}. Stop it (`fuser {path}` shows it), or name another folder."
    )
