"""What the host's kernel says: processes killed for memory, a process's largest size, the CPU's name.

The kernel counts its OOM kills per control group (v2: `memory.events`, v1: `memory.oom_control`) and for the
whole machine (`/proc/vmstat`). A child that died of SIGKILL while one of these counters rose was killed for
memory; nothing tells more, since the kernel's log is not ours to read.
"""

from __future__ import annotations

import platform
import re
import resource
import sys
from pathlib import Path


def oom_kills(root: Path = Path("/")) -> int:
    """Sum of the kernel's OOM-kill counters that concern this process; 0 where there are none."""
    counters = [root / "proc/vmstat"]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        group = path.strip("/")
        if not controllers:
            counters += [
                root / "sys/fs/cgroup" / group / "memory.events",
                root / "sys/fs/cgroup/memory.events",
            ]
        elif "memory" in controllers.split(","):
            counters += [
                root / "sys/fs/cgroup/memory" / group / "memory.oom_control",
                root / "sys/fs/cgroup/memory/memory.oom_control",
            ]
    return sum(_counted(path) for path in dict.fromkeys(counters))


def _counted(path: Path) -> int:
    found = re.search(r"^oom_kill (\d+)$", _read(path), re.MULTILINE)
    return int(found[1]) if found else 0


def peak_resident_bytes() -> int:
    """Largest resident memory of this process so far.

    `VmHWM` rather than `getrusage`: Linux hands `ru_maxrss` through fork and exec, so that the child of a
    large notebook would report the notebook's size. Loader workers share most of our pages and are not added.
    """
    found = re.search(r"^VmHWM:\s+(\d+) kB$", _read(Path("/proc/self/status")), re.MULTILINE)
    if found:
        return int(found[1]) * 1024
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def cpu_name() -> str:
    """The CPU as it names itself."""
    found = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine() or "CPU"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
