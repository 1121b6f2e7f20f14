"""Memory of an engine's session: measured in the process that runs it, and predicted for the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.measurement.host import peak_resident_bytes

if TYPE_CHECKING:
    import torch


def watch_session(loop: Any) -> None:
    """Let the first comparison of outputs add `session_bytes` to a step's results.

    They are the bytes by which the memory of the process has grown since this call, at its peak. On a GPU
    they are the used bytes of the device without those of torch's allocator. An engine's arena never shrinks
    there, so the bytes after the last call are the peak.
    """
    before, outputs = occupied_bytes(loop.device), loop.outputs

    def outputs_and_bytes() -> Any:
        loop.results.setdefault("session_bytes", occupied_bytes(loop.device, peak=True) - before)
        return outputs()

    loop.outputs = outputs_and_bytes


def occupied_bytes(device: torch.device, *, peak: bool = False) -> int:
    """Return the resident bytes of this process, or with `peak` their largest value so far. For a GPU, return
    the used bytes of the device without those of torch's allocator.
    """
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return total - free - torch.cuda.memory_reserved(device)
    return peak_resident_bytes() if peak else _resident_bytes()


def _resident_bytes() -> int:
    """Return the resident memory of this process in bytes, or its peak if the system has no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return peak_resident_bytes()
    import resource

    return pages * resource.getpagesize()
