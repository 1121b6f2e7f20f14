"""Create the file of the option `--trace`: a predicted step for PyTorch's memory viewer, or for Perfetto.

**Chrome's format.** A step in Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing
open.

The host and the device have two tracks each: phases and kernels. Copies of offloaded activations have one
track, and collectives have another. A counter shows allocated bytes by category.

The times of a kernel's launch and run come from the simulated queue (`timeline.py`). A trace does not record
between which kernels an allocation happens. So a phase's allocations are spread evenly over the host's time
in the phase.

**Memory snapshots.** Convert a trace to a snapshot of CUDA memory, in the format of
`torch.cuda.memory._dump_snapshot`.

PyTorch's memory viewer (pytorch.org/memory_viz) and `torch.cuda._memory_viz` read it. Addresses are those of
the replayed allocator. Stack frames contain the operator and its module, and the phase and step. Times
(`time_us`) count events, since a trace records their order only.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from snugfit.errors import UsageError
from snugfit.prediction.allocator import Allocator, driver_actions, is_small
from snugfit.prediction.exchanges import exchanges
from snugfit.prediction.predict import rehearse_again
from snugfit.prediction.rates import rates_for
from snugfit.prediction.timeline import phase_spans, time_kernels
from snugfit.rehearsal.trace.trace import COLLECTIVES, COPIES

if TYPE_CHECKING:
    from snugfit.prediction.timeline import TimedKernel
    from snugfit.rehearsal.trace.trace import Block, Mark, Trace
    from snugfit.results.prediction import Prediction


SNAPSHOT, CHROME = ".pickle", ".json"


def export_trace(prediction: Prediction, form: str) -> bytes:
    """Simulate a prediction's step again, and return its trace as a file with the ending `form`.

    `form` is `.pickle` (memory snapshot) or `.json` (timeline). Raises `UsageError` for a timeline without a
    GPU, and `GpuError` if the GPU's rates (speeds of kernels) are unknown.
    """
    if form == CHROME and prediction.gpu is None:
        raise UsageError("--trace FILE.json is a timeline in seconds, which need a GPU. Add --gpu NAME.")
    trace, setup = rehearse_again(prediction), prediction.recipe.setup()
    if form == SNAPSHOT:
        return pickle.dumps(memory_snapshot(trace, expandable=setup.expandable_segments))
    assert prediction.gpu is not None
    rates = rates_for(prediction.gpu, prediction.gpus)
    timed = time_kernels(
        trace,
        rates,
        exchanges().link(prediction.gpu, rates),
        workers=setup.loader.workers,
    )
    return json.dumps(chrome_trace(trace, timed), allow_nan=False, separators=(",", ":")).encode()


# ---- chrome's format ---------------------------------------------------------------------------------------


MICRO = 1e6
"""Number of microseconds per second. The trace format counts time in microseconds."""

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
    for entry in timed:
        kernel = entry.kernel
        about = {"module": kernel.module, "shapes": str(list(kernel.shapes)), "dtype": kernel.dtype}
        work = {"flops": kernel.flops, "bytes": kernel.nbytes}
        launch = {"ts": MICRO * entry.launch, "dur": MICRO * entry.launch_seconds}
        yield _entry("X", kernel.operator, TRACKS["host"], cat="host", **launch)
        run = {"ts": MICRO * entry.start, "dur": MICRO * entry.device_seconds}
        track = "copies" if kernel.operator in COPIES else "device"
        track = "communication" if kernel.operator in COLLECTIVES else track
        yield _entry("X", kernel.operator, TRACKS[track], cat="device", **run, args=about | work)


def _counters(trace: Trace, timed: Sequence[TimedKernel]) -> Iterator[dict[str, Any]]:
    """Yield counter entries with the allocated bytes by category (weights, activations, ...) after each
    allocation or free of the step.
    """
    last = max(mark.step for mark in trace.marks)
    # Consecutive marks of one phase count as one.
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

    The events of one phase are spread evenly over the host's time in the phase. A phase without kernels takes
    no time.
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


# ---- memory snapshots --------------------------------------------------------------------------------------


def memory_snapshot(trace: Trace, *, expandable: bool = False) -> dict[str, Any]:
    """Return the snapshot of a trace: each allocation and free in order, and the allocator's segments at the
    end."""
    allocator = Allocator(expandable=expandable)
    actions = driver_actions(trace, allocator.addresses)
    live: dict[int, Any] = {}
    entries: list[dict[str, Any]] = []
    segments: list[dict[str, Any]] = []

    def note(action: str, address: int, size: int, block: Block) -> None:
        # The viewer needs ascending times, but a trace has only an order.
        entries.append({
            "action": action, "addr": address, "size": size, "stream": 0, "time_us": len(entries),
            "frames": _frames(block), "category": str(block.kind),
        })  # fmt: skip

    for event in trace.events:
        block = trace.blocks[abs(event) - 1]
        if event < 0:
            freed = live.pop(-event)
            # torch records two actions for each free.
            for action in ("free_requested", "free_completed"):
                note(action, freed.address, block.nbytes, block)
            allocator.release(freed)
            continue
        for act in actions.get(event, ()):
            act()
        before = allocator.reserved
        stream = trace.streams.get(event - 1, 0)
        live[event] = handed_out = allocator.allocate(block.nbytes, trace.memory_of(event - 1), stream)
        if mapped := allocator.reserved - before:
            # a new segment begins with the block; an expandable one ends with it or its remainder
            rest = handed_out.after
            end = rest.address + rest.size if rest else handed_out.address + handed_out.size
            start = end - mapped if expandable else handed_out.address
            note("segment_map" if expandable else "segment_alloc", start, mapped, block)
            segments.append({"address": start, "total_size": mapped, "small": is_small(handed_out.pool)})
        note("alloc", handed_out.address, block.nbytes, block)
    frames = {live_block.address: _frames(trace.blocks[event - 1]) for event, live_block in live.items()}
    blocks = [*live.values(), *allocator.free_blocks()]
    joined = _join_pages(segments) if expandable else segments
    return {
        "segments": [_segment(segment, blocks, frames, expandable=expandable) for segment in joined],
        "device_traces": [entries],
        "allocator_settings": {"expandable_segments": expandable},
        "external_annotations": [],
    }


def _frames(block: Block) -> list[dict[str, Any]]:
    """Return the stack frames of a memory block, with the operator first, as snapshots begin with the
    innermost frame.
    """
    module = block.module or "the loop"
    return [
        {"name": block.operator, "filename": module, "line": 0},
        {
            "name": block.phase,
            "filename": f"step {block.step + 1}" if block.step >= 0 else "before",
            "line": 0,
        },
    ]


def _join_pages(segments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the consecutive pages of each pool into one segment. Return the segments."""
    pools: dict[bool, dict[str, Any]] = {}
    for segment in segments:
        pool = pools.setdefault(segment["small"], {**segment, "total_size": 0})
        pool["total_size"] += segment["total_size"]
    return list(pools.values())


def _segment(
    segment: dict[str, Any], blocks: Sequence[Any], frames: dict[int, Any], *, expandable: bool
) -> dict[str, Any]:
    start, size = segment["address"], segment["total_size"]
    # A segment lists its blocks by address.
    inside = sorted(
        (block for block in blocks if start <= block.address < start + size), key=lambda block: block.address
    )
    active = sum(block.size for block in inside if not block.free)
    return {
        "device": 0, "address": start, "total_size": size, "stream": 0,
        "segment_type": "small" if segment["small"] else "large", "is_expandable": expandable,
        "segment_pool_id": (0, 0), "allocated_size": active, "active_size": active,
        "requested_size": sum(block.requested for block in inside if not block.free),
        "frames": [],
        "blocks": [
            {
                "address": block.address, "size": block.size,
                "requested_size": 0 if block.free else block.requested,
                "state": "inactive" if block.free else "active_allocated",
                "frames": [] if block.free else frames[block.address],
            }
            for block in inside
        ],
    }  # fmt: skip
