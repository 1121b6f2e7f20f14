"""When each kernel of the steady step is launched and runs: the queue of `seconds.py`, moment by moment."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from snugfit.prediction.exchanges import exchanges
from snugfit.prediction.kernel_seconds import KernelClock
from snugfit.prediction.seconds import (
    COMPUTES,
    SIMULATED_STEPS,
    TRAVELS,
    Stretch,
    between_syncs,
    each_once,
    launch_seconds,
    queue_roles,
    sync_points,
    with_worker_batches,
)
from snugfit.rehearsal.trace.trace import ALONE, COLLECTIVES, COPIES
from snugfit.results.step_seconds import PhaseSpan

if TYPE_CHECKING:
    from snugfit.prediction.exchanges import GpuLink, StreamsRun
    from snugfit.prediction.rates import HostLaunchCosts, Rates
    from snugfit.rehearsal.trace.trace import Kernel, Trace

QUEUE_DEPTH = 1024
"""Launches that a CUDA stream takes before the host waits for the oldest kernel to end.

NVIDIA documents no figure; about 1,000 were measured (forums.developer.nvidia.com/t/68937). The length of a
step does not depend on it. So many kernels occupy the device for longer than the host pauses.
"""


class TimedKernel(NamedTuple):
    """One kernel of the steady step; moments in seconds since the host began the step."""

    kernel: Kernel
    """The kernel, as the trace has it."""
    launch: float
    """When the host begins to launch it."""
    launch_seconds: float
    """Seconds that the host takes to launch it."""
    start: float
    """When the device begins to run it."""
    device_seconds: float
    """Seconds that the device takes to run it."""


def run_in_streams(
    trace: Trace, rates: Rates, connected: GpuLink | None = None, *, workers: int = 0
) -> StreamsRun | None:
    """Return the steady step of a trace whose exchanges run in parallel to the computation, else None."""
    kernels = with_worker_batches(workers, trace.kernels)
    if all(each_once(lambda kernel: kernel.peers == ALONE, kernels)):
        return None
    clock = KernelClock(rates, connected)
    device = each_once(clock.seconds, kernels)
    launches = each_once(lambda kernel: launch_seconds(kernel, rates.host), kernels)
    syncs = sync_points(kernels, trace.waits)
    return exchanges().run_in_streams(kernels, device, launches, syncs, rates.host)


def time_kernels(
    trace: Trace,
    rates: Rates,
    connected: GpuLink | None = None,
    *,
    workers: int = 0,
    streams: StreamsRun | None = None,
) -> list[TimedKernel]:
    """Return the kernels of the trace's steady step in order, each with its moments.

    The moments come from the queue that `simulate_queue` adds up, with an end. `streams` is an earlier result
    of `run_in_streams`, or None.
    """
    kernels = with_worker_batches(workers, trace.kernels)
    launches = each_once(lambda kernel: launch_seconds(kernel, rates.host), kernels)
    streams = streams or run_in_streams(trace, rates, connected, workers=workers)
    if streams is not None:
        return [
            TimedKernel(kernel, launch, launch_time, start, end - start)
            for kernel, launch_time, (launch, start, end) in zip(
                kernels, launches, streams.moments, strict=True
            )
        ]
    clock = KernelClock(rates, connected)
    device = each_once(clock.seconds, kernels)
    waits = sync_points(kernels, trace.waits)
    moments = queue_moments(device, launches, waits, rates.host, queue_roles(kernels))
    return [
        TimedKernel(kernel, launch, launch_time, start, device_time)
        for kernel, launch_time, device_time, (launch, start) in zip(
            kernels, launches, device, moments, strict=True
        )
    ]


def phase_spans(timed: Iterable[TimedKernel]) -> tuple[PhaseSpan, ...]:
    """Return the spans of the step's phases on the host and on the device, in order."""
    spans: list[PhaseSpan] = []
    for phase, members in groupby(timed, key=lambda one: one.kernel.phase):
        part = list(members)
        run = [one for one in part if one.kernel.operator not in COPIES | COLLECTIVES] or part
        first, last = part[0], part[-1]
        spans.append(
            PhaseSpan(
                lane="host",
                phase=phase,
                start_seconds=first.launch,
                end_seconds=last.launch + last.launch_seconds,
                busy_seconds=sum(one.launch_seconds for one in part),
            )
        )
        spans.append(
            PhaseSpan(
                lane="device",
                phase=phase,
                start_seconds=run[0].start,
                end_seconds=run[-1].start + run[-1].device_seconds,
                busy_seconds=sum(one.device_seconds for one in run),
            )
        )
    return tuple(spans)


def queue_moments(
    device: Sequence[float],
    launches: Sequence[float],
    syncs: Sequence[int],
    host: HostLaunchCosts,
    roles: Sequence[int] = (),
) -> list[tuple[float, float]]:
    """Return the beginning of each kernel's launch, and of its run, in seconds since the host began the last
    step.

    It simulates `SIMULATED_STEPS` steps. The host is at most `QUEUE_DEPTH` launches ahead of the device.
    """
    roles = roles or [COMPUTES] * len(device)
    now = free = link = 0.0
    ends: deque[float] = deque([0.0] * QUEUE_DEPTH, maxlen=QUEUE_DEPTH)
    moments: list[tuple[float, float]] = []
    if set(roles) <= {COMPUTES}:
        return _moments_of_computation(between_syncs(device, launches, sorted(syncs)), host)
    for _ in range(SIMULATED_STEPS):
        begin, pending, moments = now, list(reversed(syncs)), []
        now += host.step
        copies: list[float] = []
        for index, (device_seconds, launch, role) in enumerate(zip(device, launches, roles, strict=True)):
            while pending and pending[-1] <= index:
                pending.pop()
                now = max(now, free) + host.wait
            now = max(now, ends[0])
            start = max(free, now + launch, link if role == TRAVELS else 0.0)
            start = start if role < 0 else max(start, copies[-1 - role])
            moments.append((now - begin, start - begin))
            now += launch
            if role == TRAVELS:
                link = start + device_seconds
                copies.append(link)
                continue
            free = start + device_seconds
            ends.append(free)
        for _ in pending:
            now = max(now, free) + host.wait
    return moments


def _moments_of_computation(stretches: Sequence[Stretch], host: HostLaunchCosts) -> list[tuple[float, float]]:
    """Return the same for a step whose kernels all compute."""
    now = free = 0.0
    ends: deque[float] = deque([0.0] * QUEUE_DEPTH, maxlen=QUEUE_DEPTH)
    moments: list[tuple[float, float]] = []
    for step in range(SIMULATED_STEPS):
        begin, is_last = now, step == SIMULATED_STEPS - 1
        now += host.step
        for waits, kernels in stretches:
            for _ in range(waits):
                now = max(now, free) + host.wait
            for device_seconds, launch in kernels:
                now = max(now, ends[0])
                launched = now + launch
                start = free if free > launched else launched
                if is_last:
                    moments.append((now - begin, start - begin))
                now = launched
                free = start + device_seconds
                ends.append(free)
    return moments
