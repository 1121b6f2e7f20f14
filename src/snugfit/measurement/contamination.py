"""Whether other processes used the GPU before, during or after an experiment.

Before: no process computes there and next to nothing is used. After: it is as it was. Both are waited for,
because the driver takes a moment to free a dead process's memory. During: NVML's process list is compared
with our processes. Three things make that list less than proof, and each is handled here:

- in a container its process ids may be the host's, so that ours are not among them: then more than one
  process is one too many;
- it may be empty or refused (containers, WSL): then the bytes decide, and what neither the allocator nor the
  context explains is another process's;
- a display's processes are not in it, but their bytes are: then the GPU is not clean, and the reason says so.

A GPU that is not clean is measured anyway and marked: `contaminated` holds the reason. Each function returns
that reason as a sentence, or None.
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

PATIENCE = 10.0
"""Seconds to wait for a GPU to become clean. A choice: how long a driver takes was not measured."""

IDLE_BYTES = 64 * MIB
"""Upper bound on what an idle GPU uses, without the driver's reserve. A choice; published idle readings are
0."""

DRIFT_BYTES = 32 * MIB
"""Upper bound on the difference of the used bytes before and after an experiment. A choice."""

LIBRARY_BYTES = 512 * MIB
"""Upper bound on what kernels and libraries loaded during a run add to the context of the first tensor. In
twenty runs of seven model families on an H200 it was 130 to 146 MiB; NCCL or another eager loader would add
more."""


@dataclass(frozen=True, kw_only=True)
class GpuBaseline:
    """The GPU before an experiment, from which all later readings are measured."""

    used_bytes: int | None
    """Used before the experiment began; None where NVML does not answer."""

    pids: frozenset[int]
    """Processes that were there already."""

    reason: str | None
    """Why it is not clean; None when it is."""

    def growth(self, peak_bytes: int | None) -> int | None:
        """A run's NVML bytes: what the device's used bytes grew by until its peak."""
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
    """The first reason why the GPU was not a run's alone, or could not be proven so; waits as `after` does.

    `reserved_bytes` is the allocator's peak, `context_bytes` the context's size at the first tensor and
    `outside_bytes` what the run is known to take without torch's allocator: its process group, and managed
    memory. Bytes are looked at `until` a moment of the monotonic clock; None looks at all.
    """
    reasons = [baseline.reason, during(sampler.censuses.values(), baseline)]
    grown = baseline.growth(sampler.peak_until(until))
    if grown is not None and reserved_bytes is not None and context_bytes is not None:
        known = context_bytes + outside_bytes
        reasons.append(unexplained_growth(grown, reserved_bytes=reserved_bytes, context_bytes=known))
    if sampler.refusal is not None:
        reasons.append(f"it is not known whether other processes used the GPU: {sampler.refusal}")
    reasons.append(after(card, baseline, patience=PATIENCE))
    return next((reason for reason in reasons if reason), None)


def before(card: Card, *, patience: float) -> GpuBaseline:
    """The GPU once it is clean, or after `patience` seconds, with the reason why it is not."""
    return _wait_while_used(partial(_read_baseline, card), lambda baseline: baseline.reason, patience)


def _wait_while_used(read: Callable[[], _T], reason_of: Callable[[_T], str | None], patience: float) -> _T:
    """The first reading without a reason, or the last one after `patience` seconds."""
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
    elif used > IDLE_BYTES and not card.counts_reserve:
        graphics = card.graphics_processes()
        user = f"a display ({_list(graphics)})" if graphics else "processes that NVML does not list"
        reason = f"before the run {show_mib(used)} MiB were used by {user}"
    return GpuBaseline(used_bytes=used, pids=pids, reason=reason)


def after(card: Card, baseline: GpuBaseline, *, patience: float) -> str | None:
    """Waits until the GPU is as it was before; the reason when after `patience` seconds it is not."""
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


def during(censuses: Iterable[Census], baseline: GpuBaseline) -> str | None:
    """Who else computed on the GPU during the run, by the process lists; None when nobody."""
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
    """The device's bytes minus ours, where the driver reports each process's bytes."""
    own = [process.bytes for process in census.own if process.bytes is not None]
    if not census.own or len(own) < len(census.own) or baseline.used_bytes is None:
        return None
    excess = census.used_bytes - baseline.used_bytes - sum(own)
    if excess <= LIBRARY_BYTES:
        return None
    return f"during the run {show_mib(excess)} MiB of the GPU belonged to others"


def unexplained_growth(grown_bytes: int, *, reserved_bytes: int, context_bytes: int) -> str | None:
    """What neither allocator nor context explains of the growth of the device's used bytes; None if little.

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
    """The processes with a compute context; none where the driver hides them."""
    try:
        return card.compute_processes()
    except NvmlUnavailable:
        return []


def _list(processes: list[GpuProcess]) -> str:
    """The processes as text, at most four by number: `process 17 (512 MiB), this process (23)`."""
    shown = []
    for process in processes:
        name = f"this process ({process.pid})" if process.pid == os.getpid() else f"process {process.pid}"
        shown.append(name if process.bytes is None else f"{name} ({show_mib(process.bytes)} MiB)")
    return some_of(shown, 4)
