"""A child process that cannot outlive or block its parent.

The child runs in its own session, so that one `killpg` reaches it and all its descendants. The parent sleeps
in `poll` on two file descriptors: the child's exit (a pidfd) and the child's output (a pipe). It uses no CPU
in between. Only the last 64 KiB of the output are stored. At the time limit the process group gets SIGTERM
and then SIGKILL. In every case, also after Ctrl-C, the group is killed and reaped.

In the child, `die_with_parent` is called first. The kernel then kills the child when the parent ends for any
reason. The same holds for each process that the child forks.

The group is killed *before* its leader is reaped. Until then the leader's zombie reserves the group's number,
so no other group can have it. psutil's `Process.wait` reaps, so it is not used here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from snugfit.measurement.host import oom_kills

TAIL_BYTES = 64 * 1024
"""Number of stored bytes at the end of a child's output, enough for a long traceback."""

GRACE_SECONDS = 5.0
"""Seconds between SIGTERM and SIGKILL when a child must end."""

REAP_SECONDS = 2.0
"""Longest wait in seconds for killed descendants to exit (chosen). `contamination.py` checks the GPU itself.
"""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class ChildExit:
    """The exit code or signal of a child process, with its last output."""

    returncode: int
    """Exit code, or minus the signal's number."""

    timed_out: bool
    """True if the process was killed because its time limit was over."""

    tail: str
    """The last part of the process's stdout and stderr."""

    oom_kills: int
    """Number of processes that the kernel killed for lack of memory during the run, from the counters that
    this process can read."""


class Child:
    """One child process with its process group; a context manager that leaves no process behind."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        grace_seconds: float = GRACE_SECONDS,
        count_oom_kills: Callable[[], int] = oom_kills,
    ) -> None:
        self._command, self._environment = list(command), dict(environment)
        self._grace, self._count = grace_seconds, count_oom_kills
        self._tail = bytearray()
        self._reaping = threading.Lock()

    def __enter__(self) -> Self:
        # The counters may be those of the whole machine, so only their growth counts.
        self._kills_before = self._count()
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._output: int | None = self._process.stdout.fileno()
        # A descendant may keep the pipe open without end, so reads must not block.
        os.set_blocking(self._output, False)
        try:
            self._pidfd: int | None = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # an old kernel, a sandbox without pidfd, or not Linux
            self._pidfd = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def pid(self) -> int:
        """The child's process id, which is also the id of its session and process group."""
        return self._process.pid

    def owns(self, pid: int) -> bool:
        """Return True if the process `pid` is in the child's session."""
        try:
            return os.getsid(pid) == self.pid
        except OSError:
            return False

    def kill(self) -> None:
        """Kill the child process and its process group at once. Another thread may wait for it meanwhile."""
        # If another thread has reaped the child, the kernel may have given its number to another process
        # group.
        with self._reaping:
            if self._process.returncode is None:
                self._signal_group(signal.SIGKILL)

    def wait(self, deadline_seconds: float) -> ChildExit:
        """Sleep until the child process has exited, or end it at its deadline. Return its exit code and last
        output.
        """
        timed_out = not self._sleep_until(time.monotonic() + deadline_seconds)
        if timed_out:
            self._signal_group(signal.SIGTERM)
            self._sleep_until(time.monotonic() + self._grace)
        self._end()
        return ChildExit(
            returncode=self._process.returncode,
            timed_out=timed_out,
            tail=self._tail.decode(errors="replace"),
            oom_kills=self._count() - self._kills_before,
        )

    def _sleep_until(self, moment: float) -> bool:
        """Sleep until the child process has exited, and read its output. Return False if the monotonic clock
        reaches `moment` first.
        """
        poller = select.poll()
        # The output is read while waiting, because a full pipe would block the child.
        for descriptor in (self._output, self._pidfd):
            if descriptor is not None:
                poller.register(descriptor, select.POLLIN)
        while not self._has_died():
            remaining = moment - time.monotonic()
            if remaining <= 0:
                return False
            # Without a pidfd, only a repeated check detects the child's exit.
            timeout = remaining if self._pidfd is not None else min(remaining, 0.05)
            # The argument of `poll` is in milliseconds, as a C int.
            ready = poller.poll(min(timeout, 3600) * 1000)
            # `poll` returns at once for a closed pipe, so the pipe is removed.
            if any(descriptor == self._output for descriptor, _ in ready) and not self._read_output():
                poller.unregister(self._process.stdout)  # type: ignore[arg-type]
        return True

    def _has_died(self) -> bool:
        """Return True if the child process has exited. It is not reaped, so that the number of its process
        group stays reserved.
        """
        if self._process.returncode is not None:
            return True
        try:
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # SIGCHLD is ignored here: the kernel reaped it
            return True
        return status is not None

    def _read_output(self) -> bool:
        """Read the child's output so far. Return False once no process has the other end open."""
        if self._output is None:
            return False
        try:
            chunk = os.read(self._output, TAIL_BYTES)
        except BlockingIOError:
            return True
        self._tail += chunk
        del self._tail[:-TAIL_BYTES]
        if not chunk:
            self._output = None
        return bool(chunk)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _end(self) -> None:
        """Kill and reap the rest of the process group, and read the rest of the output. A second call is
        allowed.
        """
        with self._reaping:
            if self._process.returncode is None:
                self._signal_group(signal.SIGKILL)
                self._process.wait()
                self._reap_group()
        for _ in range(64):  # bounded, as descendants may write without end
            if self._output is None or not select.select([self._output], [], [], 0)[0]:
                break
            self._read_output()
        if self._process.stdout is not None:
            self._process.stdout.close()
            self._output = None
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _reap_group(self) -> None:
        """Wait until the process group is empty. Members that became our children (in process 1 of a
        container) are reaped here.
        """
        deadline = time.monotonic() + REAP_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-self.pid, os.WNOHANG)
            # Signal 0 only checks that the group has members.
            try:
                os.killpg(self.pid, 0)
            except (ProcessLookupError, PermissionError):
                return
            time.sleep(0.01)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent dies, and likewise every process that it forks.

    It must be the first call. A parent that died before the registration would go unnoticed, so the parent's
    process id is compared afterwards. Only Linux supports this; on other systems the function has no effect.
    """
    if sys.platform != "linux":
        return
    # Python's standard library has no `prctl`.
    libc = ctypes.CDLL(None, use_errno=True)
    forker: list[int | None] = [None]

    def request(expected: int) -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != expected:
            os._exit(128 + signal.SIGTERM)

    def before_fork() -> None:
        # The kernel would react to the end of the parent *thread*, so this is only set for forks from the
        # main thread.
        in_main = threading.current_thread() is threading.main_thread()
        forker[0] = os.getpid() if in_main else None

    def in_forked() -> None:
        if forker[0] is not None:
            request(forker[0])

    request(parent)
    os.register_at_fork(before=before_fork, after_in_child=in_forked)
