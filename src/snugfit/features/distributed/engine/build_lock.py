"""Removal of torch's lock on the build folder of a C++ extension, if the process that built there is dead.

`torch.utils.file_baton.FileBaton` is a file that exists while one process builds. A killed process leaves it
behind, and each later one waits for it endlessly. While a builder lives, it has the file open, and ninja and
the compiler work in the folder. Linux lists both in /proc. So a lock is dead under three conditions. No
process has it open, none works in its folder, and no file there has changed for some seconds.

This is sure only if all builders are visible. The file must be this user's, on a file system of this machine,
and no other container may share it. Elsewhere a line names the awaited process or lock, and the file to
delete.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

if TYPE_CHECKING:
    from torch.utils.file_baton import FileBaton

QUIET_SECONDS = 3.0
"""Seconds without a change in the build folder after which a build by another process counts as dead
(chosen).
"""

SECONDS_TO_LINE = 3.0
"""Seconds of a wait for another build after which a printed line explains the wait (chosen)."""

POLL_SECONDS = 0.5
"""Seconds between two checks of the build lock (chosen)."""

LOCAL_FILE_SYSTEMS = frozenset({
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "ramfs", "overlay",
})  # fmt: skip
"""Names of file systems that only this machine writes to, so that a lock's process is on it."""

FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The machine's root process namespace, which also has the processes of containers (Linux,
include/linux/proc_ns.h: PROC_PID_INIT_INO).
"""

MOUNT_POINT, AFTER_OPTIONAL_FIELDS = 4, " - "
"""Index of the mount point, and the text that ends the optional fields, in a line of /proc/self/mountinfo
(proc_pid_mountinfo(5)).
"""


class Unseen(Exception):
    """Error: a process or file of a running build may exist, but cannot be inspected."""


def print_line(text: str) -> None:
    """Print a line on stderr."""
    print(f"snugfit: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def dead_locks_removed(tell: Callable[[str], None] = print_line) -> Iterator[None]:
    """Context in which torch waits only for build locks of live processes. The function `tell` receives a
    message when a wait begins and when a dead lock is removed.
    """
    from torch.utils.file_baton import FileBaton

    acquire = FileBaton.try_acquire

    def acquire_in_the_end(baton: FileBaton) -> bool:
        """Let torch try the build again after each wait, and return True: the process with the lock may have
        died.
        """
        wait = LockWait(Path(baton.lock_file_path), tell)
        while not acquire(baton):
            wait.look()
            time.sleep(POLL_SECONDS)
        return True

    with patch.object(FileBaton, "try_acquire", acquire_in_the_end):
        yield


class LockWait:
    """The lock file of another process's build of a C++ extension, and the reasons for waiting that were
    printed.
    """

    def __init__(self, lock: Path, tell: Callable[[str], None]) -> None:
        self._lock, self._tell = lock, tell
        self._began, self._text = time.monotonic(), ""

    def look(self) -> None:
        """Remove the lock file if its process is dead; otherwise print the reason of the wait, once for each
        reason.
        """
        reason = remove_if_dead(self._lock)
        if reason is None:
            name = self._lock.parent.name
            self._tell(f"A process was killed while it built {name}. Its lock is removed: {self._lock}.")
        elif reason not in ("", self._text) and time.monotonic() - self._began >= SECONDS_TO_LINE:
            self._text = reason
            self._tell(reason)


def remove_if_dead(lock: Path) -> str | None:
    """Remove the lock if its holder is dead, and return None. Otherwise return the reason as a sentence, or
    an empty string if the lock is free by now.
    """
    try:
        with _only_one_removes(lock.parent):
            if builders := builders_at(lock):
                number = ", ".join(map(str, builders))
                return f"Waiting for process {number}, which builds {lock.parent.name} in {lock.parent}."
            # A time in the future comes from a wrong clock, and does not prove that the build runs.
            if (changed := _last_change(lock)) > (now := time.time()) - QUIET_SECONDS and changed <= now:
                return f"Waiting for {lock}: its holder is not found, and files next to it still change."
            lock.unlink()
    except FileNotFoundError:
        return ""
    except (Unseen, OSError) as fault:
        return (
            f"Waiting for {lock}: {lock.parent.name} may be built by a process that is not seen from here "
            f"({fault}). If nothing builds there, delete that file."
        )
    return None


@contextlib.contextmanager
def _only_one_removes(folder: Path) -> Iterator[None]:
    """Context with a file lock on this folder, so that only one process at a time removes stale build
    locks.
    """
    # Several processes may find a lock dead at once. The second one must not remove the first one's new lock.
    import fcntl  # does not exist on Windows

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _last_change(lock: Path) -> float:
    """Return the time of the last change of a file in the build folder, in seconds since 1970."""
    times = [lock.stat().st_mtime, lock.parent.stat().st_mtime]
    for entry in os.scandir(lock.parent):
        with contextlib.suppress(FileNotFoundError):
            times.append(entry.stat(follow_symlinks=False).st_mtime)
    return max(times)


def builders_at(lock: Path) -> list[int]:
    """Return the ids of the processes that have the lock open or work in its folder. Raises `Unseen` where
    some of them may be invisible.
    """
    file, folder = lock.stat(), lock.parent.stat()
    builders = [pid for pid in _processes() if _has_open(pid, file) or _works_in(pid, folder)]
    if not builders:
        _refuse_unseen(lock, file)
    return builders


def _refuse_unseen(lock: Path, file: os.stat_result) -> None:
    """Raise `Unseen` if a process may use the build folder without being listed in /proc."""
    if file.st_uid != os.geteuid():
        raise Unseen(f"the file is user {file.st_uid}'s")
    kind = _file_system(lock)
    if kind not in LOCAL_FILE_SYSTEMS:
        raise Unseen(f"other machines may write to its file system, {kind}")
    is_first = os.readlink("/proc/self/ns/pid") == FIRST_PID_NAMESPACE
    # Only this container sees a folder on its own file system.
    if not is_first and file.st_dev != os.stat("/").st_dev:
        raise Unseen("other containers may share its folder")


def _file_system(path: Path) -> str:
    """Return the type of the file system that the path is on."""
    real, best, kind = path.resolve(), "", ""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        mount, _, rest = line.partition(AFTER_OPTIONAL_FIELDS)
        # A space in a path is written in octal.
        point = mount.split()[MOUNT_POINT].replace("\\040", " ")
        # A later mount at the same mount point hides the earlier one.
        if real.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, rest.split()[0]
    return kind


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _has_open(pid: int, file: os.stat_result) -> bool:
    """Return True if the process has this file open. Raises `Unseen` if the open files of a process of this
    user cannot be listed. Processes of other users are ignored.
    """
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError, PermissionError):
                if os.path.samestat(os.stat(entry.path), file):
                    return True
    except PermissionError:
        with contextlib.suppress(FileNotFoundError):
            if os.stat(f"/proc/{pid}").st_uid == os.geteuid():
                raise Unseen(f"process {pid} shows no files") from None
    except (FileNotFoundError, ProcessLookupError):
        pass
    return False


def _works_in(pid: int, folder: os.stat_result) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.stat(f"/proc/{pid}/cwd"), folder)
    return False
