"""Predict a step's timeline: when each kernel is launched and when it runs, by the simulated queue of
`seconds.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from snugfit.prediction.exchanges import exchanges
from snugfit.prediction.seconds import (
    each_once,
    queue_of,
    queue_roles,
    run_queue,
)
from snugfit.rehearsal.trace.trace import ALONE, COLLECTIVES, COPIES
from snugfit.results.step_seconds import PhaseSpan

if TYPE_CHECKING:
    from snugfit.prediction.exchanges import GpuLink, StreamsRun
    from snugfit.prediction.rates import HostLaunchCosts, Rates
    from snugfit.rehearsal.trace.trace import Kernel, Trace

QUEUE_DEPTH = 1024
"""Number of launches that a CUDA stream queues before the host waits for the oldest kernel to end.

NVIDIA documents no figure; about 1,000 were measured (forums.developer.nvidia.com/t/68937). The limit does
not change a step's seconds, since 1,024 kernels occupy the device for longer than the host pauses.
"""


class TimedKernel(NamedTuple):
    """One kernel of a step; times in seconds since the host began the step."""

    kernel: Kernel
    """Kernel as recorded in the trace."""
    launch: float
    """Second, from the step's beginning, at which the host begins to launch the kernel."""
    launch_seconds: float
    """Seconds that the host takes to launch it."""
    start: float
    """Second, from the step's beginning, at which the device begins to run the kernel."""
    device_seconds: float
    """Seconds that the device takes to run it."""


def run_in_streams(
    trace: Trace, rates: Rates, connected: GpuLink | None = None, *, workers: int = 0
) -> StreamsRun | None:
    """Return the simulated step of a trace with several CUDA streams, in which collectives run in parallel;
    None for one stream.
    """
    # A single stream needs no simulation of several.
    if all(each_once(lambda kernel: kernel.peers == ALONE, trace.kernels)):
        return None
    return exchanges().run_in_streams(*queue_of(trace, rates, connected, workers=workers)[:-1])


def time_kernels(
    trace: Trace,
    rates: Rates,
    connected: GpuLink | None = None,
    *,
    workers: int = 0,
    streams: StreamsRun | None = None,
) -> list[TimedKernel]:
    """Return the kernels of the trace's last step in order, each with the times of its launch and run.

    The times come from the queue of `simulate_queue`, with at most `QUEUE_DEPTH` pending launches. `streams`
    is an earlier result of `run_in_streams`, or None.
    """
    streams = streams or run_in_streams(trace, rates, connected, workers=workers)
    kernels, device, launches, syncs, host, _ = queue_of(trace, rates, connected, workers=workers)
    if streams is not None:
        spans = [(launch, start, end - start) for launch, start, end in streams.moments]
    else:
        moments = queue_moments(device, launches, syncs, host, queue_roles(kernels))
        spans = [(*moment, seconds) for moment, seconds in zip(moments, device, strict=True)]
    return [
        TimedKernel(kernel, launch, launch_time, start, seconds)
        for kernel, launch_time, (launch, start, seconds) in zip(kernels, launches, spans, strict=True)
    ]


def phase_spans(timed: Iterable[TimedKernel]) -> tuple[PhaseSpan, ...]:
    """Return the begin and end of each phase of a step, on the host and on the device, in order."""
    spans: list[PhaseSpan] = []
    for phase, members in groupby(timed, key=lambda timed_kernel: timed_kernel.kernel.phase):
        part = list(members)
        # Copies and exchanges run in parallel, so they do not delimit the phase on the device.
        run = [
            timed_kernel for timed_kernel in part if timed_kernel.kernel.operator not in COPIES | COLLECTIVES
        ] or part
        first, last = part[0], part[-1]
        spans.append(
            PhaseSpan(
                lane="host",
                phase=phase,
                start_seconds=first.launch,
                end_seconds=last.launch + last.launch_seconds,
                busy_seconds=sum(timed_kernel.launch_seconds for timed_kernel in part),
            )
        )
        spans.append(
            PhaseSpan(
                lane="device",
                phase=phase,
                start_seconds=run[0].start,
                end_seconds=run[-1].start + run[-1].device_seconds,
                busy_seconds=sum(timed_kernel.device_seconds for timed_kernel in run),
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
    """Return the times at which each kernel's launch and run begin, in seconds since the host began the last
    step. The host is at most `QUEUE_DEPTH` launches ahead of the device.
    """
    return run_queue(device, launches, syncs, host, roles, depth=QUEUE_DEPTH)[1]
