"""Checks for other processes on the GPU before, during and after an experiment.

Before: no process computes on the GPU and almost no memory is used. After: the GPU is in the same state as
before. Both checks wait, because the driver needs a moment to free the memory of an ended process. During:
NVML's list of processes is compared with those of the measurement. The list alone is no proof, for three
reasons:

- In a container its process ids may be the host's, so that it does not show ours. Then two processes or more
  are contamination.
- It may be empty or refused (containers, WSL). Then the bytes decide: any that neither the allocator nor the
  context explains belong to another process.
- It omits a display's processes, but not their bytes. Then the GPU is not clean, and the reason mentions
  them.

A measurement on a GPU with other processes runs anyway, and its field `contaminated` has the reason. Each
function returns the reason as a sentence, or None.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from snugfit.errors import some_of
from snugfit.measurement.nvml import Card, GpuProcess, NvmlUnavailable
from snugfit.measurement.sampler import Census, Sampler
from snugfit.units import MIB, show_mib

_T = TypeVar("_T")

MAX_WAIT_SECONDS = 10.0
"""Longest wait in seconds for other processes to leave the GPU (chosen). The delay of a driver was not
measured."""

IDLE_BYTES = 64 * MIB
"""Largest used bytes of a GPU that counts as idle, without the driver's reserve (chosen). Published idle
readings are 0."""

DRIFT_BYTES = 32 * MIB
"""Largest accepted difference in bytes between the GPU's used memory before and after an experiment (chosen).
"""

LIBRARY_BYTES = 512 * MIB
"""Largest accepted growth of a CUDA context in bytes, by kernels and libraries that are loaded after the
first tensor. In twenty runs of seven model families on an H200 it was 130 to 146 MiB. NCCL or another eager
loader would add more."""


@dataclass(frozen=True, kw_only=True)
class GpuBaseline:
    """The GPU before an experiment, as the reference for all later readings."""

    used_bytes: int | None
    """Used bytes of the GPU before the experiment began; None if NVML gives no data."""

    pids: frozenset[int]
    """Ids of the processes on the GPU before the experiment."""

    reason: str | None
    """Reason why a measurement on this GPU may be wrong, such as another process; None if it is idle."""

    def growth(self, peak_bytes: int | None) -> int | None:
        """Return the bytes that a run adds to the GPU's used bytes in NVML, until its peak."""
        if peak_bytes is None or self.used_bytes is None:
            return None
        return max(0, peak_bytes - self.used_bytes)


def first_reason(
    card: Card,
    baseline: GpuBaseline,
    sampler: Sampler,
    *,
    reserved_bytes: int | None,
    context_bytes: int | None,
    outside_bytes: int = 0,
    until: float | None = None,
) -> str | None:
    """Return the first sign that the GPU was shared, or that this could not be excluded, as a sentence; None
    for a clean run. Waits as `after` does.

    `reserved_bytes` is the allocator's peak and `context_bytes` the size of the context at the first tensor.
    `outside_bytes` are allocations of the run outside torch's allocator: its process group, and managed
    memory. Growth counts up to the moment `until` of the monotonic clock, or over all readings for None.
    """
    reasons = [baseline.reason, sentence_on_processes(sampler.censuses.values(), baseline)]
    grown = baseline.growth(sampler.peak_until(until))
    if grown is not None and reserved_bytes is not None and context_bytes is not None:
        known = context_bytes + outside_bytes
        reasons.append(unexplained_growth(grown, reserved_bytes=reserved_bytes, context_bytes=known))
    if sampler.refusal is not None:
        reasons.append(f"it is not known whether other processes used the GPU: {sampler.refusal}")
    reasons.append(after(card, baseline, patience=MAX_WAIT_SECONDS))
    return next((reason for reason in reasons if reason), None)


def before(card: Card, *, patience: float) -> GpuBaseline:
    """Wait until no other process uses the GPU, and return its used memory and processes. After `patience`
    seconds, return them with the reason why the GPU is not clean.
    """
    return _wait_while_used(partial(_read_baseline, card), lambda baseline: baseline.reason, patience)


def _wait_while_used(read: Callable[[], _T], reason_of: Callable[[_T], str | None], patience: float) -> _T:
    """Call `read` until `reason_of` is None for the reading, and return it; return the last reading after
    `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        reading = read()
        if reason_of(reading) is None or time.monotonic() >= deadline:
            return reading
        time.sleep(min(0.2, patience / 10))


def _read_baseline(card: Card) -> GpuBaseline:
    try:
        used = card.memory().used_bytes
    except NvmlUnavailable as refusal:
        return GpuBaseline(
            used_bytes=None,
            pids=frozenset(),
            reason=f"it is not known whether other processes used the GPU: {refusal}",
        )
    processes = _compute_processes(card)
    pids = frozenset(process.pid for process in processes)
    reason = None
    if processes:
        reason = f"before the run {_list(processes)} used this GPU"
    # NVML's version 1 counts the driver's reserve as used, so the used bytes show nothing.
    elif used > IDLE_BYTES and not card.counts_reserve:
        graphics = card.graphics_processes()
        user = f"a display ({_list(graphics)})" if graphics else "processes that NVML does not list"
        reason = f"before the run {show_mib(used)} MiB were used by {user}"
    return GpuBaseline(used_bytes=used, pids=pids, reason=reason)


def after(card: Card, baseline: GpuBaseline, *, patience: float) -> str | None:
    """Wait until the GPU's memory and processes are as before the run; then return None. After `patience`
    seconds, return a sentence on the difference that remains.
    """
    if baseline.used_bytes is None:
        return None
    return _wait_while_used(partial(_leftover, card, baseline), lambda reason: reason, patience)


def _leftover(card: Card, baseline: GpuBaseline) -> str | None:
    try:
        used = card.memory().used_bytes
    except NvmlUnavailable as refusal:
        return f"it is not known whether other processes used the GPU after the run: {refusal}"
    foreign = [process for process in _compute_processes(card) if process.pid not in baseline.pids]
    if foreign:
        return f"after the run {_list(foreign)} used this GPU"
    excess = used - (baseline.used_bytes or 0)
    return f"after the run {show_mib(excess)} MiB were not released" if excess > DRIFT_BYTES else None


def sentence_on_processes(censuses: Iterable[Census], baseline: GpuBaseline) -> str | None:
    """Return a sentence on other processes that used the GPU during the run, from the process lists; None
    without any."""
    censuses = list(censuses)
    lists_ours = any(census.own for census in censuses)
    for census in censuses:
        foreign = [process for process in census.foreign if process.pid not in baseline.pids]
        if lists_ours and foreign:
            return f"during the run {_list(foreign)} used this GPU"
        if not lists_ours and len(foreign) > 1:
            return f"during the run {len(foreign)} processes used this GPU, and only one was ours"
        reason = _foreign_bytes(census, baseline)
        if reason:
            return reason
    return None


def _foreign_bytes(census: Census, baseline: GpuBaseline) -> str | None:
    """Return a sentence on bytes that other processes use on the device, where the driver reports each
    process's; None without any."""
    # Some drivers list a process without its number of bytes.
    own = [process.bytes for process in census.own if process.bytes is not None]
    # If the bytes of one process are unknown, the difference of sums shows nothing.
    if not census.own or len(own) < len(census.own) or baseline.used_bytes is None:
        return None
    excess = census.used_bytes - baseline.used_bytes - sum(own)
    if excess <= LIBRARY_BYTES:
        return None
    return f"during the run {show_mib(excess)} MiB of the GPU belonged to others"


def unexplained_growth(grown_bytes: int, *, reserved_bytes: int, context_bytes: int) -> str | None:
    """Return a sentence on used bytes that allocator and context do not explain; None if they are few.

    For a process alone on its GPU, grown = context (at the first tensor) + libraries loaded later + reserved.
    """
    excess = grown_bytes - reserved_bytes - context_bytes
    if excess <= LIBRARY_BYTES:
        return None
    return (
        f"during the run the device used {show_mib(excess)} MiB more than this run's context and "
        "allocator: another process, or a library that allocates GPU memory without torch"
    )


def _compute_processes(card: Card) -> list[GpuProcess]:
    """Return the processes with a CUDA context on the GPU; none where the driver hides them."""
    try:
        return card.compute_processes()
    except NvmlUnavailable:
        return []


def _list(processes: list[GpuProcess]) -> str:
    """Return processes as text for a message: `process 17 (512 MiB), this process (23)`. It lists at most
    four by number.
    """
    shown = []
    for process in processes:
        name = f"this process ({process.pid})" if process.pid == os.getpid() else f"process {process.pid}"
        shown.append(name if process.bytes is None else f"{name} ({show_mib(process.bytes)} MiB)")
    return some_of(shown, 4)
