"""Relative form of a trace: events do not name memory blocks by number, so that segments can be repeated,
left out and joined.

In a trace, a free names the number of its block, which changes with all events before it. In a relative
trace, it names the position of the block among the live ones. All blocks with the same size, operator,
module, phase and kind are on one stack. A free names the stack and the distance from its top. So the same
events fit every layer, micro-batch and step. Phases, kernels, waits and ends of steps are events too, in
order.

`RelativeTrace.of(trace, marks).trace()` equals the original trace in every field.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from snugfit.rehearsal.trace.trace import (
    DEFAULT_STREAM,
    GRAPH_STREAM,
    Block,
    Kernel,
    Mark,
    MarkKind,
    Period,
    Trace,
)
from snugfit.results.footprint import Kind

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""Regular expression of a layer number in a module's dotted name."""

STATES: str = Kind.OPTIMIZER_STATES


class Alloc(NamedTuple):
    """An allocation of a memory block, with the fields of `Block` except the step.

    Blocks in the pool of CUDA graphs have the stream `GRAPH_STREAM`.
    """

    nbytes: int
    operator: str
    module: str
    phase: str
    kind: str
    stream: int = DEFAULT_STREAM
    dtype: str = ""

    @property
    def stack(self) -> Alloc:
        """Key of the memory block's stack: size, operator, module and other properties that all blocks of a
        stack share.
        """
        return _stack_of(self)


class Place(NamedTuple):
    """Position of a kernel in a trace's last step: its CUDA stream, and its distance back from the event that
    refers to it."""

    stream: int
    since: int
    """Number of kernels of this stream between the kernel and the event."""


class Free(NamedTuple):
    """A free of a live memory block. The block is given by its stack (blocks with equal properties) and its
    distance from the top.
    """

    stack: Alloc
    stack_distance: int
    """Number of live blocks on its stack that were allocated after it."""
    awaited: tuple[Place, ...] = ()
    """Kernels that must finish before the allocator reuses the block (`Trace.awaited`)."""


class StreamWait(NamedTuple):
    """Wait of the next kernel's stream for kernels of other streams (`Kernel.after`)."""

    after: tuple[Place, ...]


class PhaseStart(NamedTuple):
    """The start of a phase in a step."""

    step: int
    phase: str


TraceEvent = Alloc | Free | PhaseStart | StreamWait | Kernel | MarkKind
"""Type of an event in a `RelativeTrace`: allocation, free, kernel, wait, start of a phase, or another mark.
"""


@functools.cache
def without_layer_numbers(module: str) -> str:
    """Return a dotted name with a wildcard for each layer number: `encoder.layer.*.output`."""
    return NUMBER.sub("*", module)


@functools.lru_cache(maxsize=1 << 17)
def _stack_of(alloc: Alloc) -> Alloc:
    """Return the stack of a memory block: live blocks with equal properties.

    Optimizer states and temporaries of an update share a stack, as do the states of different parameters. The
    recorder cannot separate these before the end of the run.
    """
    if alloc.kind not in (Kind.TEMPORARIES, STATES):
        return alloc._replace(module=without_layer_numbers(alloc.module), dtype="")
    # One update works on all layers alike, so its temporaries of any parameter share a stack.
    module = "" if alloc.phase == "update" else without_layer_numbers(alloc.module)
    return alloc._replace(module=module, kind="", dtype="")


@dataclass(frozen=True)
class RelativeTrace:
    """The events of a recorded run in a form that can be repeated. A free refers to its block by the position
    among live blocks.
    """

    moves: tuple[TraceEvent, ...]
    attention: tuple[str, ...]
    """Names of the attention kernels that the run uses."""
    doubts: tuple[str, ...] = ()
    """Warnings about assumptions of the simulation."""
    groups: int = 0
    """Number of process groups with communication, as in `Trace.groups`."""

    @classmethod
    def of(cls, trace: Trace, marks: Sequence[Mark] = ()) -> RelativeTrace:
        """Return a trace in relative form.

        `marks` are all marks of its recording. Without them, kernels, waits and ends of steps are left out.
        """
        events = tuple(_moves(trace, marks or trace.marks))
        return cls(events, trace.attention, trace.doubts, trace.groups)

    def trace(self) -> Trace:
        """Return the trace with absolute block numbers. Raise `LookupError` if an event frees a block that is
        not live.
        """
        return _absolute(self)


def _moves(trace: Trace, marks: Sequence[Mark]) -> Iterator[TraceEvent]:
    live, kernels, order = LiveSet(), iter(trace.kernels), StreamKernels()
    start = 0
    for end, step, phase, kind in marks:
        yield from _moves_between(trace, start, end, live, order)
        start = end
        if kind is MarkKind.PHASE:
            yield PhaseStart(step, phase)
        elif kind is MarkKind.KERNEL:
            kernel = next(kernels)
            if kernel.after:
                yield StreamWait(order.places(kernel.after))
                # Kernel indices change with each joined part, so an event refers to kernels by stream and
                # distance.
                kernel = kernel._replace(after=())
            order.add(kernel)
            yield kernel
        else:
            yield kind
    yield from _moves_between(trace, start, len(trace.events), live, order)


def _moves_between(
    trace: Trace, start: int, end: int, live: LiveSet, order: StreamKernels
) -> Iterator[TraceEvent]:
    streams, awaited, of_graphs = trace.streams, trace.awaited, trace.of_graphs
    for event in trace.events[start:end]:
        if event > 0:
            block = trace.blocks[event - 1]
            stream = streams.get(event - 1, DEFAULT_STREAM) if streams else DEFAULT_STREAM
            # Graphs have a separate pool: blocks of their stream are on separate stacks.
            if of_graphs and event - 1 in of_graphs:
                stream = GRAPH_STREAM
            # `tuple.__new__` skips the named constructor: a long run has millions of blocks.
            alloc: Alloc = tuple.__new__(Alloc, (*block[:4], block[5], stream, block[6]))
            live.alloc(alloc)
            yield alloc
        elif awaited and (kernels := awaited.get(-event - 1)):
            yield live.free_of(-event - 1)._replace(awaited=order.places(kernels))
        else:
            yield live.free_of(-event - 1)


class StreamKernels:
    """The kernels of a trace's step so far, by stream, to convert between indices and relative positions."""

    def __init__(self) -> None:
        self._of: list[tuple[int, int]] = []  # stream of each kernel, and its index in the stream
        self._streams: dict[int, list[int]] = defaultdict(list)

    def add(self, kernel: Kernel) -> None:
        """Add a launched kernel to those of its stream."""
        numbers = self._streams[kernel.stream]
        self._of.append((kernel.stream, len(numbers)))
        numbers.append(len(self._of) - 1)

    def places(self, kernels: Iterable[int]) -> tuple[Place, ...]:
        """Return the positions of kernels, given by their indices in the step, as distances back in their
        streams.
        """
        of = [self._of[number] for number in kernels]
        # The distance counts from the newest kernel, so that the last kernel has the same place in every
        # micro-batch.
        return tuple(Place(stream, len(self._streams[stream]) - 1 - number) for stream, number in of)

    def numbers(self, places: Iterable[Place]) -> tuple[int, ...]:
        """Return the indices in the step of kernels that are given as distances back in their streams,
        ascending. Raise `LookupError` if there is no such kernel.
        """
        return tuple(sorted(self._streams[stream][-1 - since] for stream, since in places))


class LiveSet:
    """The live memory blocks of a run, grouped in stacks of blocks with equal properties. Blocks are numbered
    in the order of their allocation.
    """

    def __init__(self) -> None:
        self.allocs: list[Alloc] = []
        """Allocation of every block, including freed ones, by block number."""
        self.stacks: dict[Alloc, list[int]] = defaultdict(list)
        """Numbers of the live blocks on each stack (blocks of equal allocations), oldest first."""

    def alloc(self, alloc: Alloc) -> int:
        """Allocate a memory block and return its number."""
        block = len(self.allocs)
        self.allocs.append(alloc)
        self.stacks[_stack_of(alloc)].append(block)
        return block

    def free(self, free: Free) -> int:
        """Remove the memory block of this free and return its number. Raise `LookupError` if there is no such
        block.
        """
        stack, distance, _ = free
        blocks = self.stacks[stack]
        if not 0 <= distance < len(blocks):
            raise LookupError(free)
        return blocks.pop(-1 - distance)

    def free_of(self, block: int) -> Free:
        """Free this memory block, and return the free as a relative event."""
        stack = _stack_of(self.allocs[block])
        blocks = self.stacks[stack]
        at = len(blocks) - 1
        # Backward passes free the youngest block first, so the search starts at the top.
        while blocks[at] != block:
            at -= 1
        del blocks[at]
        return Free(stack, len(blocks) - at)

    def follow(self, events: Iterable[TraceEvent]) -> range:
        """Apply the allocations and frees among these events. Return the numbers of the allocated blocks."""
        first = len(self.allocs)
        for event in events:
            if type(event) is Alloc:
                self.alloc(event)
            elif type(event) is Free:
                self.free(event)
        return range(first, len(self.allocs))


def _absolute(relative: RelativeTrace) -> Trace:
    writer = TraceWriter(relative.moves)
    writer.follow(relative.moves)
    return writer.trace(relative)


class TraceWriter:
    """Convert relative events of a run into a trace with numbered memory blocks. `moves` are all events that
    may occur.
    """

    def __init__(self, events: Iterable[TraceEvent]) -> None:
        self._blocks: list[Block] = []
        self._events: list[int] = []
        self._marks: list[Mark] = []
        self._periods: list[Period] = []
        self._last, self._streams = _SteadyStep(), dict[int, int]()
        self._stacks: dict[Alloc, list[int]] = defaultdict(list)
        self._by_move: dict[int, list[int]] = {}
        """Stacks (lists of live blocks of equal allocations) by the id of an allocation event. Repeated
        events are one object, and computing their hash is slow.
        """
        self._step, self._phase, self._released = -1, "", False
        self._is_plain = all(map(_is_plain, events))

    def follow(self, moves: Iterable[TraceEvent], step: int | None = None) -> None:
        """Append these relative events to the trace; `step` replaces the step of their phases if it is given.
        Raise `LookupError` if an event frees a block that is not live.
        """
        blocks, events, marks, streams = self._blocks, self._events, self._marks, self._streams
        by_move, stacks, last = self._by_move, self._stacks, self._last
        current = self._step
        new, releases, empties = tuple.__new__, MarkKind.CONTEXT_RELEASED, MarkKind.CACHE_EMPTIED
        for event in moves:
            if type(event) is Alloc:
                if event[5] != DEFAULT_STREAM:
                    streams[len(blocks)] = event[5]
                blocks.append(new(Block, (*event[:4], current, event[4], event[6])))
                number = len(blocks)
                events.append(number)
                # A repeated move is the same object, and its id hashes faster than its fields.
                stack = by_move.get(id(event))
                if stack is None:
                    stack = by_move[id(event)] = stacks[_stack_of(event)]
                stack.append(number)
            elif type(event) is Free:
                stack = by_move.get(id(event))
                if stack is None:
                    stack = by_move[id(event)] = stacks[event.stack]
                if not 0 <= event[1] < len(stack):
                    raise LookupError(event)
                number = stack.pop(-1 - event[1])
                _append_free(number, blocks, events)
                if event[2]:
                    last.awaited[number - 1] = last.order.numbers(event[2])
            elif type(event) is PhaseStart:
                # Repeated events have the step of their recording, so the caller gives the current one.
                begins = event.step if step is None else step
                if begins != current:
                    # A trace has kernels of the last step only, so each new step drops those before it.
                    last = self._last = _SteadyStep()
                current = self._step = begins
                self._phase = event.phase
                marks.append(Mark(len(events), current, event.phase))
            # Each joined part may release the context; only the first release counts.
            elif event is empties or (event is releases and not self._released):
                self._released |= event is releases
                marks.append(Mark(len(events), current, self._phase, event))
            else:
                last.follow(event, len(events), ordered=not self._is_plain)

    def follow_times(self, events: Sequence[TraceEvent], times: int, step: int) -> None:
        """Append these relative events `times` times to the trace. Once a repetition begins and ends with the
        same live blocks, further copies only increase block numbers.
        """
        first, written = len(self._blocks), 0
        while written < times:
            further = times - written - 1
            # Without a further copy there is nothing to shift.
            counts = self._counts() if further and self._may_shift(events) else None
            before = self._live(events) if counts else {}
            self.follow(events, step)
            written += 1
            if counts and self._is_shifted(before, len(self._blocks) - counts.blocks, first):
                self._shift(counts, further, first, events)
                return

    def trace(self, relative: RelativeTrace) -> Trace:
        """Return the trace of all events written so far."""
        last, streams = self._last, self._streams
        return Trace(
            tuple(self._blocks),
            tuple(self._events),
            tuple(self._marks),
            tuple(last.kernels),
            tuple(last.waits),
            relative.attention,
            relative.doubts,
            frozenset(block for block, stream in streams.items() if stream == GRAPH_STREAM),
            streams={block: stream for block, stream in streams.items() if stream != GRAPH_STREAM},
            awaited=last.awaited,
            launched=tuple(last.launched) if last.awaited else (),
            groups=relative.groups,
            periods=tuple(self._periods),
        )

    def _counts(self) -> _TraceSize:
        last = self._last
        return _TraceSize(
            len(self._blocks),
            len(self._events),
            len(self._marks),
            len(last.kernels),
            len(last.waits),
        )

    def _may_shift(self, events: Sequence[TraceEvent]) -> bool:
        """Return True if a repetition of these events can be written as the same events with other
        identifiers of memory blocks.
        """
        return self._is_plain and not any(
            # A freed state changes its kind (`_append_free`); blocks of other streams have further entries.
            (type(event) is Alloc and (event.kind == STATES or event.stream != DEFAULT_STREAM))
            or event is MarkKind.STEP_END
            for event in events
        )

    def _live(self, events: Sequence[TraceEvent]) -> dict[int, list[int]]:
        """Return the live memory blocks on the stacks that these events use."""
        stacks = {id(stack): stack for stack in map(self._stack, events) if stack is not None}
        return {key: [*stack] for key, stack in stacks.items()}

    def _stack(self, event: TraceEvent) -> list[int] | None:
        if type(event) is not Alloc and type(event) is not Free:
            return None
        stack = self._by_move.get(id(event))
        if stack is None:
            key = _stack_of(event) if type(event) is Alloc else event.stack
            stack = self._by_move[id(event)] = self._stacks[key]
        return stack

    def _is_shifted(self, before: Mapping[int, Sequence[int]], by: int, first: int) -> bool:
        """Return True if the live blocks are those of `before`, with block numbers above `first` increased by
        `by`.
        """
        # Blocks from before the repeated part stay. Only blocks of the part itself may move.
        stacks = {id(stack): stack for stack in self._stacks.values()}
        return all(
            stacks[key] == [number + by if number > first else number for number in numbers]
            for key, numbers in before.items()
        )

    def _shift(self, counts: _TraceSize, times: int, first: int, moves: Sequence[TraceEvent]) -> None:
        """Repeat the events written since these counts `times` more times, with new block numbers."""
        blocks, events, marks, last = self._blocks, self._events, self._marks, self._last
        of_blocks, of_events = blocks[counts.blocks :], events[counts.events :]
        of_marks = marks[counts.marks :]
        of_kernels = last.kernels[counts.kernels :]
        of_waits = last.waits[counts.waits :]
        launched = last.launched[counts.kernels :]
        self._periods.append(Period(counts.events, len(of_events), len(of_blocks), times + 1))
        for time in range(1, times + 1):
            by, later = time * len(of_blocks), time * len(of_events)
            blocks += of_blocks
            events += [event + by if event > 0 else event - by for event in of_events]
            marks += [mark._replace(event=mark.event + later) for mark in of_marks]
            last.kernels += of_kernels
            launches = time * len(of_kernels)
            last.waits += [wait + launches for wait in of_waits]
            last.launched += [event + later for event in launched]
        # The stacks must have the same contents as if every copy had been written.
        by = times * len(of_blocks)
        for stack in {id(stack): stack for stack in map(self._stack, moves) if stack is not None}.values():
            stack[:] = [number + by if number > first else number for number in stack]


class _TraceSize(NamedTuple):
    """Numbers of blocks, events, marks, kernels and waits that a trace has so far."""

    blocks: int
    events: int
    marks: int
    kernels: int
    waits: int


def _is_plain(event: TraceEvent) -> bool:
    """Return True if this event concerns only one CUDA stream."""
    return type(event) is not StreamWait and not (type(event) is Free and event.awaited)


class _SteadyStep:
    """The kernels of a trace's last step so far, and the waits of the host and of CUDA streams."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.waits: list[int] = []
        self.launched: list[int] = []
        self.awaited: dict[int, tuple[int, ...]] = {}
        self.order = StreamKernels()
        self._after: tuple[int, ...] = ()

    def follow(self, event: TraceEvent, events: int, *, ordered: bool = True) -> None:
        """Add an event to the record of the last step, after `events` allocations and frees. With `ordered`,
        kernels are indexed by stream for later waits.
        """
        if type(event) is Kernel:
            self.kernels.append(event._replace(after=self._after) if self._after else event)
            self.launched.append(events)
            if ordered:
                self.order.add(event)
            self._after = ()
        elif type(event) is StreamWait:
            self._after = self.order.numbers(event.after)
        elif event is MarkKind.WAIT:
            self.waits.append(len(self.kernels))


def _append_free(number: int, blocks: list[Block], events: list[int]) -> None:
    events.append(-number)
    block = blocks[number - 1]
    if block[5] == STATES:
        # A state is alive at the end of the run. A state that a later step replaces was a temporary.
        blocks[number - 1] = block._replace(kind=Kind.TEMPORARIES, module="")
