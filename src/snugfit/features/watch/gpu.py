"""Measurements of one GPU during a watched block of code, as plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WatchedGpu:
    """Measurements of one GPU during a watched block of code. A value that could not be measured is None."""

    index: int
    """CUDA index in this process."""
    name: str | None = None
    uuid: str | None = None
    requested_bytes: int | None = None
    """Peak of the bytes that this process's tensors requested."""
    allocated_bytes: int | None = None
    """Peak of the bytes of the blocks that the allocator handed out."""
    reserved_bytes: int | None = None
    """Peak of the bytes that the allocator reserved on the device."""
    retries: int | None = None
    """Number of times that the allocator released its cache to serve a request."""
    nvml_bytes: int | None = None
    """Peak of the bytes in use by all processes, without the driver's reserve where NVML separates it."""
    process_bytes: int | None = None
    """Part of `nvml_bytes` of this process, where the driver reports it."""
    reserve_bytes: int | None = None
    """The driver's own reserve."""
    total_bytes: int | None = None
    utilization: float | None = None
    """Mean share of the time in which a kernel ran, after the first second."""
    utilization_fault: str | None = None
    """Reason why `utilization` is None."""
    other_processes: str | None = None
    """A sentence about other processes on the GPU; None if none were detected."""
    doubt: str | None = None
    """Reason why a value is missing."""
