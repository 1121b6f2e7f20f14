"""Figures of the host from the operating system: processes killed for memory, peak memory, CPU name, and CPU
load.

psutil reads most counters. Two more are read from /proc. One is the number of processes that the kernel
killed for memory. It is counted per control group (v2 `memory.events`, v1 `memory.oom_control`) and for the
machine (`/proc/vmstat`). The other is the peak of resident memory. If a child process died of SIGKILL while
such a counter rose, it counts as killed for memory. There is no better evidence, because the kernel's log is
not readable.

The CPU load shows if other processes used the cores while steps were timed. On a host that is always crowded,
every step is equally slow, so the times look stable. On two cores next to two busy processes, a tiny BERT
took 1.35 s a step, with a spread of 1 %. With one thread instead of two it took 13 ms. (Probably threads at a
barrier wait for the one without a core.)

Limits: the counters are those of the whole machine. If the process may only use a few cores, other processes
on these can go unnoticed. The counters are also coarse, so very short runs seem undisturbed.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

MIN_LOAD_SECONDS = 0.2
"""Shortest time in seconds between two readings of the CPU load (chosen). The kernel's counters are too
coarse for less."""

CROWDED_BUSY_SHARE, CROWDED_OTHER_SHARE = 0.9, 0.1
"""Shares of the host's total CPU time above which it counts as crowded (chosen): of all processes, and of
other processes."""


def oom_kills(root: Path = Path("/")) -> int:
    """Return the sum of the kernel's OOM-kill counters that concern this process; 0 where there are none."""
    counters = [root / "proc/vmstat"]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # In cgroup version 2, the list of controllers is empty.
        if not controllers:
            hierarchy, counter = root / "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            hierarchy, counter = root / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        # In a container, this path may be the host's, while the group's files are at the root.
        counters += [hierarchy / path.strip("/") / counter, hierarchy / counter]
    return sum(_number(r"^oom_kill (\d+)$", path) or 0 for path in dict.fromkeys(counters))


def peak_resident_bytes() -> int:
    """Return the largest resident memory of this process so far, in bytes.

    Linux passes `ru_maxrss` of `getrusage` through fork and exec, so the child of a large notebook would
    report the notebook's size. `VmHWM` does not have this fault. Loader workers share most of our pages and
    are not added.
    """
    kibibytes = _number(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status"))
    if kibibytes is not None:
        return kibibytes * 1024
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The unit of `ru_maxrss` is bytes on macOS, KiB on Linux.
    return largest if sys.platform == "darwin" else largest * 1024


def cpu_name() -> str:
    """Return the name of the CPU from the system."""
    name = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return name[1].strip() if name else platform.processor() or platform.machine() or "CPU"


def spill_to_host() -> str | None:
    """Return a warning about drivers of Windows that move memory to the host when the GPU is full.

    They run under Windows itself, and under WSL, which is recognised by its kernel's release. None elsewhere.
    """
    if platform.system() != "Windows" and "microsoft" not in platform.release().lower():
        return None
    return (
        "under Windows and WSL the driver may move GPU memory into the host's memory instead of refusing it. "
        "A run that does not fit then becomes many times slower and does not fail. NVIDIA's control panel "
        "has a switch, CUDA - Sysmem Fallback Policy (Prefer No Sysmem Fallback)"
    )


@dataclass(frozen=True, kw_only=True)
class HostLoad:
    """CPU counters at one moment, in seconds since a fixed start."""

    wall: float
    """Time of the reading, in seconds of the monotonic clock."""

    busy: float
    """CPU seconds that all cores of the machine were busy."""

    own: float
    """CPU seconds of this process and of its children, both running and finished. For a family of processes,
    those of all its running members."""


def host_load(family: int | None = None) -> HostLoad | None:
    """Return the host's CPU counters now; None where the system has none. With a process id `family`, the CPU
    seconds of all its descendants count as own.
    """
    import psutil

    try:
        times = psutil.cpu_times()
    except (OSError, RuntimeError, ValueError):
        return None
    # `steal` is CPU time that the hypervisor gave to other virtual machines.
    busy = sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
    # The fifth value of `os.times` is wall-clock time.
    own = sum(os.times()[:4]) if family is None else 0.0
    for process in psutil.Process(family).children(recursive=True):
        try:
            own += sum(process.cpu_times()[:2])
        except psutil.Error:
            continue
    return HostLoad(wall=time.monotonic(), busy=busy, own=own)


def crowding(first: HostLoad | None, last: HostLoad | None, cores: int) -> str | None:
    """Return a sentence on the cores that other processes used between two readings. None if they used few,
    or some cores were idle.
    """
    if first is None or last is None or last.wall - first.wall < MIN_LOAD_SECONDS:
        return None
    wall = last.wall - first.wall
    busy, own = (last.busy - first.busy) / wall, (last.own - first.own) / wall
    foreign = busy - own
    if busy < CROWDED_BUSY_SHARE * cores or foreign < CROWDED_OTHER_SHARE * cores:
        return None
    return f"other processes used {foreign:.1f} of the host's {cores} cores, and almost none was idle"


def _number(pattern: str, path: Path) -> int | None:
    """Return the number that a pattern matches in a system file such as `/proc/vmstat`; None without a
    match.
    """
    match = re.search(pattern, _read(path), re.MULTILINE)
    return int(match[1]) if match else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
