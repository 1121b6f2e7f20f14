"""Pinning of the threads that launch a GPU's kernels to a CPU core that no other process disturbs.

On the rented host of an H200 (2026-11-21) a step took 23 ms on some cores. The same step took 34 to 38 ms on
others. This changed from second to second, and the scheduler did not move the process to another core. We
assume that two hardware threads share each core, and that another virtual machine used the second thread of
the slow ones. A virtual machine has no counter for that. A loop of pure Python, however, takes almost twice
as long on such a core.

Such a loop is therefore timed between phases of a step, a few times a second. If it is slow, the training
thread and autograd's thread move to a core on which it is fast. Both threads share one core, because they
take turns and never run together.

All other threads, and every forked process, may use all cores of the process. A program that `subprocess`
starts may not: it inherits the single core. psutil pins only whole processes, so threads are pinned by
`os.sched_setaffinity`.
"""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
from contextlib import suppress
from pathlib import Path

LOOP_ITERATIONS = 1_500
"""Number of iterations of a loop that measures the core's speed. They take 20 to 40 microseconds."""

DISTURBED_RATIO = 1.25
"""Ratio of the loop's time to its shortest time, above which other processes count as disturbing the core.
Measured ratios were 1.0 to 1.1 and 1.6 to 1.9."""

INTERVAL, INTERVAL_ALL_DISTURBED = 0.2, 1.0
"""Seconds between two checks of the core: if an undisturbed core was found, and if all were disturbed
(chosen). A check takes 0.1 ms, and 2 ms if all of 16 cores are tried."""

MAX_CORES_TRIED = 32
"""Largest number of cores to try in one check. Cores that were undisturbed last, or never tried, come first.
"""

TASKS = Path("/proc/self/task")

AUTOGRAD = "pt_autograd"
"""Prefix of the names that torch gives to the threads of its backward pass."""

ALL_CORES: set[int] = set()
"""Indices of all cores, which a forked process may use again; empty while no thread is bound to one core."""


class QuietCore:
    """Keeps the calling thread, and autograd's, on an undisturbed core. It has no effect where the system
    cannot pin."""

    def __init__(self, share: tuple[int, int] = (0, 1)) -> None:
        """Limit the candidate cores to a share. `share` is the number of this process and the count of all
        that do so, so that each has its own cores. (Both threads of a core, numbers i and i + n/2 on most
        hosts, go to one process.)"""
        self._cores = (
            os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") and TASKS.is_dir() else set()
        )
        self._candidates = sorted(self._cores)[share[0] :: share[1]]
        """Indices of the cores to which the thread may move."""
        self._loop_seconds: dict[int, float] = {}
        """Last measured seconds of the loop on each core, by the core's index."""
        self._best = math.inf
        self._next_check = 0.0
        self._is_autograd: dict[str, bool] = {}
        """True for threads of torch's backward pass, by thread id as text."""
        self._samples: list[float] = []
        """Seconds of the loop at each check."""
        self.disturbed_samples = 0
        """Number of checks so far in which other processes disturbed the core."""

    def sample(self) -> None:
        """Time the test loop once and count a disturbance of the core; move no thread."""
        # Before the first check, there is no shortest time to compare with.
        if self._samples:
            self.disturbed_samples += self._time_loop() > DISTURBED_RATIO * self._best

    def rebalance(self) -> None:
        """Time the test loop on the current core if a check is due, and move the thread away from a disturbed
        core.
        """
        if time.perf_counter() < self._next_check or len(self._candidates) < 2:
            return
        seconds = self._time_core()
        self._samples.append(seconds)
        disturbed = seconds > DISTURBED_RATIO * self._best
        self.disturbed_samples += disturbed
        # The first check has no earlier time to compare with, so all cores are tried.
        quiet = len(self._samples) > 1 and not disturbed
        if not quiet:
            quiet = self._move()
        self._pin_autograd()
        self._next_check = time.perf_counter() + (INTERVAL if quiet else INTERVAL_ALL_DISTURBED)

    def release(self) -> None:
        """Allow the pinned threads to use all cores again; the timed samples stay."""
        ALL_CORES.clear()
        autograd = (int(thread) for thread, is_autograd in self._is_autograd.items() if is_autograd)
        for thread in (threading.get_native_id(), *autograd):
            with suppress(OSError):
                os.sched_setaffinity(thread, self._cores)

    def disturbed_share(self) -> float | None:
        """Return the fraction of the checks in which another process disturbed the core; None without a
        check.
        """
        if not self._samples:
            return None
        return statistics.fmean(seconds > DISTURBED_RATIO * self._best for seconds in self._samples)

    def loop_seconds(self) -> float | None:
        """Return the median seconds of the test loop over all checks of the core; None without a check."""
        return statistics.median(self._samples) if self._samples else None

    def _move(self) -> bool:
        """Move the thread to the first undisturbed core, or at the first check to the fastest of all cores.
        Return False if every core was disturbed.
        """
        candidates = sorted(self._candidates, key=lambda core: self._loop_seconds.get(core, 0.0))
        ALL_CORES.update(self._cores)
        for core in candidates[:MAX_CORES_TRIED]:
            with suppress(OSError):  # the core may be no longer available
                os.sched_setaffinity(0, {core})
                self._loop_seconds[core] = self._time_core()
                if len(self._samples) > 1 and self._loop_seconds[core] <= DISTURBED_RATIO * self._best:
                    return True
        best = min(self._loop_seconds, key=self._loop_seconds.__getitem__, default=None)
        if best is not None:
            with suppress(OSError):
                os.sched_setaffinity(0, {best})
        # The first check cannot detect that even the fastest core is disturbed, so it counts as quiet.
        return len(self._samples) == 1

    def _pin_autograd(self) -> None:
        """Pin autograd's threads to the current core. Give all cores back to other threads that inherited the
        pinning.
        """
        core = os.sched_getaffinity(0)
        for thread in os.listdir(TASKS):
            with suppress(OSError):  # a thread may end at any moment
                own = thread == str(threading.get_native_id())
                new = thread not in self._is_autograd and not own
                if new:
                    self._is_autograd[thread] = (TASKS / thread / "comm").read_text().startswith(AUTOGRAD)
                if not own and (new or self._is_autograd[thread]):
                    os.sched_setaffinity(int(thread), core if self._is_autograd[thread] else self._cores)

    def _time_core(self) -> float:
        """Return the seconds of the test loop on the current core: the shortest of three, because one
        interruption is no disturbance.
        """
        seconds = min(self._time_loop() for _ in range(3))
        self._best = min(self._best, seconds)
        return seconds

    @staticmethod
    def _time_loop() -> float:
        began = time.perf_counter()
        for _ in range(LOOP_ITERATIONS):
            pass
        return time.perf_counter() - began


def _give_all_cores_to_forked() -> None:
    if ALL_CORES:
        with suppress(OSError):
            os.sched_setaffinity(0, ALL_CORES)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_give_all_cores_to_forked)
