"""What the operating system says of the host: kills for memory, peak memory, the CPU's name, and its load.

psutil reads the counters that it knows. Two it does not know and are read from /proc here: how many processes
the kernel killed for memory (counted per control group, v2 `memory.events`, v1 `memory.oom_control`, and for
the machine in `/proc/vmstat`), and the peak of resident memory. A child that died of SIGKILL while a kill
counter rose was killed for memory; nothing says more, since the kernel's log is not ours to read.

The load shows whether other processes took the cores while steps were timed. A host that is crowded all the
time makes every step equally slow, and so looks stable: on two cores beside two busy processes a tiny BERT's
steps took 1.35 s with a spread of 1 %, and 13 ms with one thread instead of two. (Probably threads that meet
at a barrier wait for the one without a core.) Limits: the counters are those of the whole machine, so a
process that is held to a few of its cores may be crowded there unnoticed; and they are coarse, so very short
runs show nothing.
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
"""Below it the kernel's ticks are too coarse. A choice."""

CROWDED_BUSY_SHARE, CROWDED_OTHER_SHARE = 0.9, 0.1
"""Crowded: so much of all cores was busy, and so much of them with other processes. A choice."""


def oom_kills(root: Path = Path("/")) -> int:
    """Sum of the kernel's OOM-kill counters that concern this process; 0 where there are none."""
    counters = [root / "proc/vmstat"]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            hierarchy, counter = root / "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            hierarchy, counter = root / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        counters += [hierarchy / path.strip("/") / counter, hierarchy / counter]
    return sum(_number(r"^oom_kill (\d+)$", path) or 0 for path in dict.fromkeys(counters))


def peak_resident_bytes() -> int:
    """Largest resident memory of this process so far, in bytes.

    `VmHWM` rather than `getrusage`: Linux hands `ru_maxrss` through fork and exec, so that the child of a
    large notebook would report the notebook's size. Loader workers share most of our pages and are not added.
    """
    kibibytes = _number(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status"))
    if kibibytes is not None:
        return kibibytes * 1024
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def cpu_name() -> str:
    """The CPU as it names itself."""
    name = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return name[1].strip() if name else platform.processor() or platform.machine() or "CPU"


def spill_to_host(system: str | None = None, release: str | None = None) -> str | None:
    """What the driver of Windows does when the GPU's memory is full, where this machine has it: under Windows
    itself, and under WSL, whose kernel's release names it. None elsewhere."""
    system, release = system or platform.system(), release or platform.release()
    if system != "Windows" and "microsoft" not in release.lower():
        return None
    return (
        "under Windows and WSL the driver may move GPU memory into the host's memory instead of refusing it: "
        "a run that does not fit becomes many times slower and does not fail. NVIDIA's control panel has a "
        "switch, CUDA - Sysmem Fallback Policy (Prefer No Sysmem Fallback)"
    )


@dataclass(frozen=True, kw_only=True)
class HostLoad:
    """CPU counters at one moment, in seconds since some beginning."""

    wall: float
    """Of the monotonic clock."""

    busy: float
    """Of all cores of the machine together."""

    own: float
    """Of this process and its living and waited-for children, or of all living processes of a family."""


def host_load(family: int | None = None) -> HostLoad | None:
    """The counters now; None where the system has none. With `family`, a process id, all that descends from
    that process counts as own."""
    import psutil

    try:
        times = psutil.cpu_times()
    except (OSError, RuntimeError, ValueError):
        return None
    busy = sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
    own = sum(os.times()[:4]) if family is None else 0.0
    for process in psutil.Process(family).children(recursive=True):
        try:
            own += sum(process.cpu_times()[:2])
        except psutil.Error:
            continue
    return HostLoad(wall=time.monotonic(), busy=busy, own=own)


def crowding(first: HostLoad | None, last: HostLoad | None, cores: int) -> str | None:
    """What other processes took between two moments when next to no core was idle; None if little."""
    if first is None or last is None or last.wall - first.wall < MIN_LOAD_SECONDS:
        return None
    wall = last.wall - first.wall
    busy, own = (last.busy - first.busy) / wall, (last.own - first.own) / wall
    foreign = busy - own
    if busy < CROWDED_BUSY_SHARE * cores or foreign < CROWDED_OTHER_SHARE * cores:
        return None
    return f"other processes used {foreign:.1f} of the host's {cores} cores, and almost none was idle"


def _number(pattern: str, path: Path) -> int | None:
    """The number that the pattern finds in a file of the system."""
    match = re.search(pattern, _read(path), re.MULTILINE)
    return int(match[1]) if match else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
