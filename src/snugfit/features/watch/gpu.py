"""Measurements of one GPU during a watched block of code, as plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WatchedGpu:
    """Measurements of one GPU during a watched block of code. A value that could not be measured is None."""

    index: int
    """Index of the GPU in this process, as in `cuda:0`."""
    name: str | None = None
    uuid: str | None = None
    requested_bytes: int | None = None
    """Peak bytes that this process's tensors requested; None if unknown."""
    allocated_bytes: int | None = None
    """Peak bytes in the allocator's used blocks; None if unknown."""
    reserved_bytes: int | None = None
    """Peak bytes that the allocator reserved on the device; None if unknown."""
    retries: int | None = None
    """Number of times that the allocator released its cached memory to serve a request."""
    nvml_bytes: int | None = None
    """Peak bytes in use by all processes. The driver's reserve is excluded if NVML reports it separately."""
    process_bytes: int | None = None
    """Bytes of `nvml_bytes` that belong to this process; None if the driver does not report them."""
    reserve_bytes: int | None = None
    """Bytes that the driver reserves for itself; None if unknown."""
    total_bytes: int | None = None
    utilization: float | None = None
    """Mean share of time in which a kernel ran, after the block's first second; None if unknown."""
    utilization_fault: str | None = None
    """Reason why `utilization` is None."""
    other_processes: str | None = None
    """A sentence about other processes on the GPU; None if none were detected."""
    doubt: str | None = None
    """Reason for missing values; None if all are known."""
