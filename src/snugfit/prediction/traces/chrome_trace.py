"""A step in Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

The host and the device have two tracks each: phases and kernels. Copies of offloaded activations have one
track, and collectives have another. A counter shows allocated bytes by category.

The times of a kernel's launch and run come from the simulated queue (`timeline.py`). A trace does not record
between which kernels an allocation happens. So a phase's allocations are spread evenly over the host's time
in the phase.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from snugfit.prediction.timeline import phase_spans
from snugfit.rehearsal.trace.trace import COLLECTIVES, COPIES

if TYPE_CHECKING:
    from snugfit.prediction.timeline import TimedKernel
    from snugfit.rehearsal.trace.trace import Mark, Trace

MICRO = 1e6
"""Microseconds per second, the unit of the trace format."""

TRACKS = {"host phases": 1, "host": 2, "device phases": 3, "device": 4, "copies": 5, "communication": 6}


def chrome_trace(trace: Trace, timed: Sequence[TimedKernel]) -> dict[str, Any]:
    """Return the Chrome trace document of a recorded step, with the times of its kernels."""
    named = [_entry("M", "process_name", 0, args={"name": "snugfit, predicted"})]
    named += [_entry("M", "thread_name", track, args={"name": name}) for name, track in TRACKS.items()]
    events = [*named, *_phases(timed), *_kernels(timed), *_counters(trace, timed)]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _entry(kind: str, name: str, track: int, **fields: Any) -> dict[str, Any]:
    return {"ph": kind, "name": name, "pid": 1, "tid": track, **fields}


def _phases(timed: Sequence[TimedKernel]) -> Iterator[dict[str, Any]]:
    for span in phase_spans(timed):
        start, length = MICRO * span.start_seconds, MICRO * (span.end_seconds - span.start_seconds)
        yield _entry("X", span.phase, TRACKS[f"{span.lane} phases"], cat="phase", ts=start, dur=length)


def _kernels(timed: Iterable[TimedKernel]) -> Iterator[dict[str, Any]]:
    for one in timed:
        kernel = one.kernel
        about = {"module": kernel.module, "shapes": str(list(kernel.shapes)), "dtype": kernel.dtype}
        work = {"flops": kernel.flops, "bytes": kernel.nbytes}
        launch = {"ts": MICRO * one.launch, "dur": MICRO * one.launch_seconds}
        yield _entry("X", kernel.operator, TRACKS["host"], cat="host", **launch)
        run = {"ts": MICRO * one.start, "dur": MICRO * one.device_seconds}
        track = "copies" if kernel.operator in COPIES else "device"
        track = "communication" if kernel.operator in COLLECTIVES else track
        yield _entry("X", kernel.operator, TRACKS[track], cat="device", **run, args=about | work)


def _counters(trace: Trace, timed: Sequence[TimedKernel]) -> Iterator[dict[str, Any]]:
    """Yield counter entries with the allocated bytes by category (weights, activations, ...) after each
    allocation or free of the step.
    """
    last = max(mark.step for mark in trace.marks)
    # Consecutive marks of one phase are one passage.
    marks = [next(members) for _, members in groupby(
        (mark for mark in trace.phases if mark.step == last), key=lambda mark: mark.phase
    )]  # fmt: skip
    # Every second span is the host's.
    times = _event_times(marks, len(trace.events), [*phase_spans(timed)][::2])
    live: dict[str, int] = {}
    for position, event in enumerate(trace.events):
        block = trace.blocks[abs(event) - 1]
        live[block.kind] = live.get(block.kind, 0) + (block.nbytes if event > 0 else -block.nbytes)
        if position in times:
            args = {str(kind): nbytes for kind, nbytes in live.items()}
            yield _entry("C", "live bytes", 0, ts=MICRO * times[position], args=args)


def _event_times(marks: Sequence[Mark], end: int, spans: Sequence[Any]) -> dict[int, float]:
    """Return the time in seconds of each allocation or free of the step, by its index in the trace.

    Those of one phase are spread evenly over the host's time in the phase. A phase without kernels takes no
    time.
    """
    times: dict[int, float] = {}
    pending, now = list(reversed(spans)), 0.0
    for mark, following in zip(marks, [*(mark.event for mark in marks[1:]), end], strict=True):
        length = 0.0
        if pending and pending[-1].phase == mark.phase:
            span = pending.pop()
            now, length = span.start_seconds, span.end_seconds - span.start_seconds
        count = following - mark.event
        times |= {mark.event + number: now + length * (number + 1) / count for number in range(count)}
        now += length
    return times
