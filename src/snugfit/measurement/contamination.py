"""A clean GPU, proven: nobody else on it before, during and after an experiment.

Before: no process computes there and next to nothing is used; after: it is as it was. Both are waited for,
because the driver takes a moment to free a dead process's memory. During: NVML's process list is compared
with ours. Three things make that list less than proof, each met here:

- in a container its process ids may be the host's, so that ours are not among them: then more than one
  process is one too many;
- it may be empty or refused (containers, WSL): then bytes must do, and what neither the allocator nor the
  context explains is somebody else's;
- a display's processes are not in it, but their bytes are: then the GPU is not clean, and the reason says so.

What is not clean is measured anyway and marked: `contaminated` holds the reason.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

from snugfit.measurement.nvml import Card, GpuProcess, NvmlUnavailable
from snugfit.measurement.sampler import Census
from snugfit.units import MIB, show_mib

PATIENCE = 10.0
"""Seconds to wait for a GPU to become clean. A choice: how long a driver takes was not measured."""

IDLE_BYTES = 64 * MIB
"""What a GPU called idle may use, the driver's reserve apart. A choice; published idle readings are 0."""

DRIFT_BYTES = 32 * MIB
"""By so much the use before and after an experiment may differ. A choice."""

LIBRARY_BYTES = 512 * MIB
"""What kernels and libraries loaded during a run may add to the context of the first tensor. In twenty runs
of seven model families on an H200 it was 130 to 146 MiB; NCCL or another eager loader would add more."""


@dataclass(frozen=True, kw_only=True)
class GpuBaseline:
    """The GPU before an experiment: what all later readings are measured from."""

    used_bytes: int | None
    """Used before the experiment began; None where NVML does not tell."""

    pids: frozenset[int]
    """Processes that were there already."""

    reason: str | None
    """Why it is not clean, or None."""


def before(card: Card, *, patience: float) -> GpuBaseline:
    """Waits for a clean GPU, and says what is in the way when it does not become one."""
    deadline = time.monotonic() + patience
    while True:
        ground = _look(card)
        if ground.reason is None or time.monotonic() >= deadline:
            return ground
        time.sleep(min(0.2, patience / 10))


def _look(card: Card) -> GpuBaseline:
    try:
        used = card.memory().used_bytes
    except NvmlUnavailable as refusal:
        return GpuBaseline(used_bytes=None, pids=frozenset(), reason=f"not proven clean: {refusal}")
    processes = _computing(card)
    pids = frozenset(process.pid for process in processes)
    reason = None
    if processes:
        reason = f"before the run {_list(processes)} used this GPU"
    elif used > IDLE_BYTES and not card.counts_reserve:
        reason = f"before the run {show_mib(used)} MiB were used by {_drawers(card)}"
    return GpuBaseline(used_bytes=used, pids=pids, reason=reason)


def after(card: Card, ground: GpuBaseline, *, patience: float) -> str | None:
    """Waits until the GPU is as it was before; the reason when it does not become so, else None."""
    if ground.used_bytes is None:
        return None
    deadline = time.monotonic() + patience
    while True:
        reason = _leftover(card, ground)
        if reason is None or time.monotonic() >= deadline:
            return reason
        time.sleep(min(0.2, patience / 10))


def _leftover(card: Card, ground: GpuBaseline) -> str | None:
    try:
        used = card.memory().used_bytes
    except NvmlUnavailable as refusal:
        return f"not proven clean after the run: {refusal}"
    strangers = [process for process in _computing(card) if process.pid not in ground.pids]
    if strangers:
        return f"after the run {_list(strangers)} used this GPU"
    excess = used - (ground.used_bytes or 0)
    return f"after the run {show_mib(excess)} MiB were not given back" if excess > DRIFT_BYTES else None


def during(censuses: Iterable[Census], ground: GpuBaseline) -> str | None:
    """Who else computed on the GPU during the run, judged by the process lists; None when nobody."""
    taken = [
        (census, [process for process in census.others if process.pid not in ground.pids])
        for census in censuses
    ]
    ours_are_seen = any(census.ours for census, _ in taken)
    for census, strangers in taken:
        if ours_are_seen and strangers:
            return f"during the run {_list(strangers)} used this GPU"
        if not ours_are_seen and len(strangers) > 1:
            return f"during the run {len(strangers)} processes used this GPU, and only one was ours"
        reason = _beyond_ours(census, ground)
        if reason:
            return reason
    return None


def _beyond_ours(census: Census, ground: GpuBaseline) -> str | None:
    """The device's bytes minus ours, where the driver tells each process's bytes."""
    if not census.ours or ground.used_bytes is None or any(process.bytes is None for process in census.ours):
        return None
    ours = sum(process.bytes or 0 for process in census.ours)
    excess = census.used_bytes - ground.used_bytes - ours
    if excess <= LIBRARY_BYTES:
        return None
    return f"during the run {show_mib(excess)} MiB of the device were not this run's"


def unexplained(*, grown_bytes: int, reserved_bytes: int, first_context_bytes: int) -> str | None:
    """What neither allocator nor context explains of the growth of the device's used bytes; None when little.

    grown = context at the first tensor + libraries loaded later + reserved, for a process alone on its GPU.
    """
    excess = grown_bytes - reserved_bytes - first_context_bytes
    if excess <= LIBRARY_BYTES:
        return None
    return (
        f"during the run the device used {show_mib(excess)} MiB beyond this run's context and allocator:"
        " another process, or a library that takes GPU memory past torch"
    )


def _computing(card: Card) -> list[GpuProcess]:
    try:
        return card.computing()
    except NvmlUnavailable:
        return []


def _drawers(card: Card) -> str:
    return f"a display ({_list(card.drawing())})" if card.drawing() else "processes that NVML does not list"


def _list(processes: list[GpuProcess]) -> str:
    """`process 17 (512 MiB), process 23`; this very process is called so."""
    shown = []
    for process in processes[:4]:
        name = f"this process ({process.pid})" if process.pid == os.getpid() else f"process {process.pid}"
        shown.append(name if process.bytes is None else f"{name} ({show_mib(process.bytes)} MiB)")
    return ", ".join(shown) + (f" and {len(processes) - 4} more" if len(processes) > 4 else "")
