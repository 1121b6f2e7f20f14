"""Compute memory profiles of a run: bytes and kernels of each micro-batch's forward and backward, and of each
optimizer update.

Allocations that outlive the run count as present from the start. So the first micro-batch equals any later
one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from snugfit.rehearsal.trace.relative import without_layer_numbers
from snugfit.rehearsal.trace.trace import MarkKind, Work
from snugfit.results.footprint import Kind

if TYPE_CHECKING:
    from snugfit.rehearsal.trace.trace import Kernel, Mark, Recording, Trace


class MicroBatchProfile(NamedTuple):
    """Peak bytes, saved bytes and kernels of one micro-batch's forward and backward, or of an optimizer
    update."""

    number: int
    """Number of the micro-batch in its step, from 1; 0 for an update."""
    peaks: Mapping[str, int]
    """Peak of allocated bytes by phase and module; layers of one stack count as one module."""
    live_after: int
    """Bytes allocated at the end of the micro-batch or update."""
    work: Work
    kept_bytes: Mapping[str, int]
    """Bytes that layers save from forward to backward, by the operator that allocated them."""


class _MicroBatchMarks(NamedTuple):
    """The marks of one micro-batch or optimizer update: its phases, kernels and waits, with their positions
    in a trace."""

    number: int
    marks: list[Mark]


def profile_micro_batches(recording: Recording) -> Iterator[MicroBatchProfile]:
    """Yield the profiles of the micro-batches and updates of a run, in order.

    Allocations that outlive the run count as present from the start. So they are left out, as are the kernels
    that only fill them.
    """
    trace, marks = recording.trace, recording.marks
    # Events after the last step free the model and are no part of a micro-batch.
    over = marks[-1].event  # the last step's end
    lasting = _lasting(trace.events[:over])
    # Up to this event, kernels may only fill allocations that outlive the run.
    all_made = max((at for at in range(over) if trace.events[at] in lasting), default=0) + 1
    live, kernels = _live_bytes(trace, lasting), iter(trace.kernels)
    parts = _marks_by_micro_batch(marks)
    ends = [*(part.marks[0].event for part in parts[1:]), over]
    for (number, part), end in zip(parts, ends, strict=True):
        ran: list[Kernel] = []
        waits: list[int] = []
        start = before = part[0].event
        for mark in part:
            if mark.kind is MarkKind.KERNEL:
                kernel = next(kernels)
                # A kernel that only fills lasting allocations has no counterpart in later micro-batches.
                if before >= all_made or not _fills_permanent_memory(
                    trace, before, mark.event, lasting, kernel
                ):
                    ran.append(kernel)
                before = mark.event
            elif mark.kind is MarkKind.WAIT:
                waits.append(len(ran))
        work = Work(tuple(ran), tuple(waits))
        peaks, kept_bytes = _peaks(trace, live, lasting, start, end), _kept_bytes(trace, lasting, start, end)
        yield MicroBatchProfile(number, peaks, live[end - 1], work, kept_bytes)


def _marks_by_micro_batch(marks: Sequence[Mark]) -> list[_MicroBatchMarks]:
    """Return the marks of each micro-batch and each update, from the first step on."""
    parts: list[_MicroBatchMarks] = []
    number, phase = -1, ""
    for mark in marks:
        if mark.kind is MarkKind.PHASE and mark.step >= 0:
            if mark.phase == "update":
                following = 0
            elif phase in ("update", "build"):
                following = 1
            else:
                # A load after a backward pass begins the next micro-batch of the same step.
                following = number + ((phase, mark.phase) == ("backward", "load"))
            if following != number:
                parts.append(_MicroBatchMarks(following, []))
            number = following
        if mark.kind is MarkKind.PHASE:
            phase = mark.phase
        if parts:
            parts[-1].marks.append(mark)
    return parts


def _lasting(events: Sequence[int]) -> set[int]:
    """Return the indices of the memory blocks that are never freed."""
    return {event for event in events if event > 0} - {-event for event in events if event < 0}


def _live_bytes(trace: Trace, lasting: Set[int]) -> list[int]:
    """Return the live bytes after each event, including all allocations that are never freed."""
    sizes = [block.nbytes for block in trace.blocks]
    changes = (
        0 if event in lasting else sizes[event - 1] if event > 0 else -sizes[-event - 1]
        for event in trace.events
    )
    return list(accumulate(changes, initial=sum(sizes[event - 1] for event in lasting)))[1:]


def _fills_permanent_memory(trace: Trace, start: int, end: int, lasting: Set[int], kernel: Kernel) -> bool:
    """Return True if this kernel only fills memory that is never freed, such as weights or workspaces."""
    allocs = {event for event in trace.events[start:end] if event > 0}
    makers = {trace.blocks[alloc - 1].operator for alloc in allocs}
    return makers == {kernel.operator} and allocs <= lasting


def _peaks(trace: Trace, live: Sequence[int], lasting: Set[int], start: int, end: int) -> dict[str, int]:
    peaks: dict[str, int] = defaultdict(int)
    for at in range(start, end):
        if (event := trace.events[at]) > 0 and event not in lasting:
            block = trace.blocks[event - 1]
            peak_key = f"{block.phase} {without_layer_numbers(block.module)}"
            peaks[peak_key] = max(peaks[peak_key], live[at])
    return dict(peaks)


def _kept_bytes(trace: Trace, lasting: Set[int], start: int, end: int) -> dict[str, int]:
    kept_bytes: dict[str, int] = defaultdict(int)
    for event in trace.events[start:end]:
        if event <= 0 or event in lasting:
            continue
        block = trace.blocks[event - 1]
        in_layer = without_layer_numbers(block.module) != block.module
        if in_layer and block.phase == "forward" and block.kind == Kind.ACTIVATIONS:
            kept_bytes[block.operator] += block.nbytes
    return dict(kept_bytes)
