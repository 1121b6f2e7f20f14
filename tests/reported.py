"""Events of the CPU's allocator during a real run of a Step, from torch's own profiler.

Law 1 compares a trace with these reports. They come from the allocator itself (`torch.profiler`, with
`profile_memory`). Each allocation and free has its address, size and time, and the operators around it.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C._profiler import _EventType

from aligned import Event
from snugfit.step.open_step import open_step
from snugfit.step.step import Observer

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.rehearsal.trace.trace import Trace
    from snugfit.techniques.setup import Setup

MARK = "snugfit:"

Calls = tuple[tuple[str, int], ...]
"""Operators in progress, outermost first, with the end time of each."""


class Marks(Observer):
    """Writes steps and phases among the profiler's events."""

    def __init__(self) -> None:
        self.step, self.open = -1, contextlib.ExitStack()

    def _write(self, phase: str) -> None:
        self.open.close()
        self.open.enter_context(torch.profiler.record_function(f"{MARK}{self.step}:{phase}"))

    def step_begins(self, index: int) -> None:
        self.step = index
        self._write("load")

    def step_ends(self, index: int) -> None:
        self._write("between")

    def phase(self, name: str) -> None:
        self._write(name)


def reports(job: Job, setup: Setup, *, loop: str = "plain", steps: int = 3) -> list[Event]:
    """Return every allocation and free of a real run on the CPU, in order, except those of the data
    loader."""
    marks = Marks()
    step = open_step(job, setup, loop, torch.device("cpu"))
    torch.manual_seed(0)
    _forget_code_books()
    return reports_of(lambda: step.run(steps, marks), marks)


def reports_of(run: Callable[[], Any], marks: Marks) -> list[Event]:
    """Return every allocation and free of a function on the CPU after the first phase of `marks`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny kernels: threads would only wait for each other
    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profiler:
            run()
            marks.open.close()
    finally:
        torch.set_num_threads(threads)
        if enabled:
            gc.enable()
    assert profiler.profiler is not None
    return _events(profiler.profiler.kineto_results.experimental_event_tree())


def _forget_code_books() -> None:
    """Restore the state of a fresh process, in which bitsandbytes has built no code books yet."""
    if (functional := sys.modules.get("bitsandbytes.functional")) is not None:
        functional.name2qmap.clear()


def _events(roots: Sequence[Any]) -> list[Event]:
    times: list[tuple[int, str]] = []
    raw: list[tuple[int, int, int, Calls]] = []
    waiting: list[tuple[Any, Calls]] = [(root, ()) for root in roots]
    while waiting:
        event, above = waiting.pop()
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            raw.append((event.start_time_ns, fields.ptr, fields.alloc_size, above))
            continue
        children = event.children
        name = event.name
        if name.startswith(MARK):
            times.append((event.start_time_ns, name.removeprefix(MARK)))
        elif children:
            above = (*above, (name, event.end_time_ns))
        waiting.extend((child, above) for child in children)
    times.sort()
    raw.sort(key=lambda one: one[0])
    return _paired(times, raw)


def _paired(times: list[tuple[int, str]], raw: list[tuple[int, int, int, Calls]]) -> list[Event]:
    starts = [time for time, _ in times]
    living: dict[int, int] = {}
    died: dict[int, int] = {}
    lines: list[tuple[int, str, int, int, Calls]] = []
    for time, address, nbytes, above in raw:
        place = bisect.bisect_right(starts, time) - 1
        step, phase = times[place][1].split(":") if place >= 0 else ("-1", "before")
        if nbytes > 0:
            if phase not in ("load", "before"):
                living[address] = len(lines)
                lines.append((int(step), phase, len(lines), nbytes, above))
        elif (birth := living.pop(address, None)) is not None:
            died[birth] = time
            lines.append((int(step), phase, birth, nbytes, lines[birth][4]))
    return [
        Event(block, nbytes, tuple(name for name, _ in above), _inside(above, died.get(block)), step, phase)
        for step, phase, block, nbytes, above in lines
    ]


def _inside(above: Calls, death: int | None) -> frozenset[str]:
    innermost = dict(above)  # a wrapper's operator calls one of the same name
    return frozenset(name for name, end in innermost.items() if death is not None and end >= death)


def foreseen(trace: Trace) -> list[Event]:
    """Return a trace as events of the same form, without the copies to the device: a CPU needs none."""
    marks = [mark.event for mark in trace.marks]
    events = []
    for position, event in enumerate(trace.events):
        block = trace.blocks[abs(event) - 1]
        if block.phase == "load":
            continue
        mark = trace.marks[bisect.bisect_right(marks, position) - 1]
        nbytes = block.nbytes if event > 0 else -block.nbytes
        words = (block.operator, block.module)
        events.append(Event(abs(event), nbytes, words, frozenset(), mark.step, mark.phase))
    return events
