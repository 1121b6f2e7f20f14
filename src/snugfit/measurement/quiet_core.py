"""A quiet core: the threads that ask a GPU for its work stay where nobody disturbs them.

On the rented host of an H200 (2026-11-21) one and the same step took 23 ms on some cores and 34 to 38 ms on
others, changing over from second to second, and the system left the process on its core all the same. We take
it that two hardware threads share each core, and that somebody else used the other half of the slow ones. A
guest cannot see that, but it can feel it: a loop of pure Python there takes almost twice as long. So at
borders of phases, a few times a second, such a loop is timed, and when it is slow the step's own thread and
that of autograd (they take turns and never run together) move to a core where it is not.

Every other thread, and every process that is forked, keeps all the cores that the process was given. (A
program that is started anew by `subprocess` does not: it inherits the one.)
"""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
from contextlib import suppress
from pathlib import Path

TURNS = 1_500
"""Of the timed loop: 20 to 40 microseconds."""

SLOW = 1.25
"""So many times as long as the shortest: disturbed. 1.0 to 1.1 and 1.6 to 1.9 were seen."""

EVERY, EVERY_IN_VAIN = 0.2, 1.0
"""Seconds until the next look, and when no core was quiet. A choice: a look takes 0.1 ms, and 2 ms where all
of 16 cores are tried."""

MOST = 32
"""Cores tried at one look; those that were quiet last, or never tried, come first."""

TASKS = Path("/proc/self/task")

AUTOGRAD = "pt_autograd"
"""What torch calls the threads of its backward pass."""

ALL_CORES: set[int] = set()
"""What a forked process is given back; empty while no thread is held."""


class QuietCore:
    """Keeps the calling thread, and autograd's, on a quiet core; where the system cannot, it does nothing."""

    def __init__(self) -> None:
        self._cores = (
            os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") and TASKS.is_dir() else set()
        )
        self._paces: dict[int, float] = {}
        """The last of each core."""
        self._best = math.inf
        self._next = 0.0
        self._known: dict[str, bool] = {}
        """Threads, and whether they are autograd's."""
        self._looks: list[float] = []
        self.felt = 0
        """How often the core was found disturbed so far."""

    def glance(self) -> None:
        """Only feels whether the core is disturbed now: one loop."""
        if self._looks:
            self.felt += self._once() > SLOW * self._best

    def look(self) -> None:
        """Looks, when it is time to, and moves away from a disturbed core."""
        if time.perf_counter() < self._next or len(self._cores) < 2:
            return
        pace = self._pace()
        self._looks.append(pace)
        disturbed = pace > SLOW * self._best
        self.felt += disturbed
        quiet = len(self._looks) > 1 and not disturbed
        if not quiet:
            quiet = self._move()
        self._take_along()
        self._next = time.perf_counter() + (EVERY if quiet else EVERY_IN_VAIN)

    def leave(self) -> None:
        """Gives all cores back to the threads that were held; what was seen stays."""
        ALL_CORES.clear()
        for thread in (threading.get_native_id(), *(int(name) for name, own in self._known.items() if own)):
            with suppress(OSError):
                os.sched_setaffinity(thread, self._cores)

    def disturbed(self) -> float | None:
        """Share of looks that found the core disturbed; None when there was none."""
        if not self._looks:
            return None
        return statistics.fmean(pace > SLOW * self._best for pace in self._looks)

    def _move(self) -> bool:
        """To the first quiet core, at the first look to the quietest of all; whether one was quiet."""
        tried = sorted(self._cores, key=lambda core: self._paces.get(core, 0.0))[:MOST]
        ALL_CORES.update(self._cores)
        for core in tried:
            with suppress(OSError):  # a core may be taken away
                os.sched_setaffinity(0, {core})
                self._paces[core] = self._pace()
                if len(self._looks) > 1 and self._paces[core] <= SLOW * self._best:
                    return True
        best = min(self._paces, key=self._paces.__getitem__, default=None)
        if best is not None:
            with suppress(OSError):
                os.sched_setaffinity(0, {best})
        return len(self._looks) == 1

    def _take_along(self) -> None:
        """Autograd's threads follow; others that were born on this core are let go."""
        here = os.sched_getaffinity(0)
        for thread in os.listdir(TASKS):
            with suppress(OSError):  # a thread may end at any time
                own = thread == str(threading.get_native_id())
                new = thread not in self._known and not own
                if new:
                    self._known[thread] = (TASKS / thread / "comm").read_text().startswith(AUTOGRAD)
                if not own and (new or self._known[thread]):
                    os.sched_setaffinity(int(thread), here if self._known[thread] else self._cores)

    def _pace(self) -> float:
        """Seconds of the loop on this core: the shortest of three, for a hiccup is no neighbour."""
        pace = min(self._once() for _ in range(3))
        self._best = min(self._best, pace)
        return pace

    @staticmethod
    def _once() -> float:
        began = time.perf_counter()
        for _ in range(TURNS):
            pass
        return time.perf_counter() - began


def _free() -> None:
    """A forked process has all cores again."""
    if ALL_CORES:
        with suppress(OSError):
            os.sched_setaffinity(0, ALL_CORES)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free)
