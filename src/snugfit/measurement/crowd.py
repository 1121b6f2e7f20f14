"""Whether the host's cores were enough, or other processes took them while steps were timed.

A host that is crowded all the time makes every step equally slow, and so looks stable. Seen on two cores
beside two busy processes: a tiny BERT's steps took 1.35 s with a spread of 1 %, and 13 ms with one thread
instead of two. (Probably threads that meet at a barrier wait for the one without a core.) The spread cannot
show that; the kernel's counters can. Limits: they count the whole machine, so a process that is held to a few
of its cores may be crowded there unseen; and they are coarse, so very short runs tell nothing.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

SHORTEST = 0.2
"""Seconds below which the kernel's ticks are too coarse. A choice."""

FULL, OTHERS = 0.9, 0.1
"""Crowded: so much of all cores was busy, and so much of them with other processes. A choice."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The counters at one moment, in seconds since some beginning."""

    wall: float
    """Of the clock."""

    busy: float
    """Of all cores of the machine together."""

    own: float
    """Of this process and its living and waited-for children."""


def load() -> Load | None:
    """The counters now; None where the kernel has none."""
    import psutil

    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        user, nice, system, _idle, _waiting, irq, soft_irq, stolen = map(int, fields)
    except (OSError, ValueError, IndexError):
        return None
    own = sum(os.times()[:4])
    for process in psutil.Process().children(recursive=True):
        try:
            own += sum(process.cpu_times()[:2])
        except psutil.Error:
            continue
    busy = (user + nice + system + irq + soft_irq + stolen) / os.sysconf("SC_CLK_TCK")
    return Load(wall=time.monotonic(), busy=busy, own=own)


def crowded(first: Load | None, last: Load | None, cores: int) -> str | None:
    """What other processes took between two moments when no core was left; None when they were no matter."""
    if first is None or last is None or last.wall - first.wall < SHORTEST:
        return None
    wall = last.wall - first.wall
    busy, own = (last.busy - first.busy) / wall, (last.own - first.own) / wall
    others = busy - own
    if busy < FULL * cores or others < OTHERS * cores:
        return None
    return f"other processes used {others:.1f} of the host's {cores} cores, and next to none was idle"
