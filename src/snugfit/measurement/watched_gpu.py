"""One GPU during a watched block: what was read of it, as plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WatchedGpu:
    """One GPU during the block; None is what could not be measured."""

    index: int
    """As CUDA counts in this process."""
    name: str | None = None
    uuid: str | None = None
    requested_bytes: int | None = None
    """Peak of what this process's tensors asked the allocator for."""
    allocated_bytes: int | None = None
    """Peak of what the allocator gave them."""
    reserved_bytes: int | None = None
    """Peak of what the allocator took from the device."""
    retries: int | None = None
    """How often the allocator released its cache to go on."""
    nvml_bytes: int | None = None
    """Peak of what all processes used on the device, without the driver's reserve where NVML shows it."""
    process_bytes: int | None = None
    """Of that, this process's share, where the driver reports it."""
    reserve_bytes: int | None = None
    """Held by the driver itself."""
    total_bytes: int | None = None
    utilization: float | None = None
    """Mean share of the time in which a kernel ran, after the first second."""
    utilization_fault: str | None = None
    """Why that is not known."""
    other_processes: str | None = None
    """Who else used the GPU, in words; None where nobody was seen."""
    doubt: str | None = None
    """Why something is missing."""
