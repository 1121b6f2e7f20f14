"""A relative trace: the same run, written so that pieces of it can be repeated, left out and joined.

A trace names a free by the number of the block, and such numbers change with everything that comes before. A
relative trace says instead *which of the live blocks* is freed. All blocks that are allocated alike (same
size, operator, module, phase and kind; layers of one stack count as one module) lie on one stack, and a free
names the stack and the distance from its top. Backward passes free the youngest first, optimizers the oldest
or the youngest, and so the same moves fit every layer, every micro-batch and every step. Phases, kernels,
waits and ends of steps stand among the moves where they happened.

Of one of several processes, what waits for a kernel of another stream names it by how many that stream has
run since: the last is the last in every micro-batch.

`RelativeTrace.of(trace, marks).trace()` is that trace again, in every field; law 5's tests hold it to that.
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
"""A layer's number in a dotted name."""

STATES: str = Kind.OPTIMIZER_STATES


class Alloc(NamedTuple):
    """A block is allocated; the fields are those of `Block`, but for the step. What lies in the pool of CUDA
    graphs is of `GRAPH_STREAM`."""

    nbytes: int
    operator: str
    module: str
    phase: str
    kind: str
    stream: int = DEFAULT_STREAM

    @property
    def stack(self) -> Alloc:
        """The stack that the block is put on, named by what its blocks have in common."""
        return _stack_of(self)


class Place(NamedTuple):
    """A kernel of the last step, from the moment that names it."""

    stream: int
    since: int
    """How many kernels this stream has run since."""


class Free(NamedTuple):
    """A live block is freed."""

    stack: Alloc
    stack_distance: int
    """How many blocks of its stack are younger."""
    awaited: tuple[Place, ...] = ()
    """Which kernels have to be done before the allocator hands it out again (`Trace.awaited`)."""


class StreamWait(NamedTuple):
    """The next kernel's stream waits for these kernels of other streams (`Kernel.after`)."""

    after: tuple[Place, ...]


class PhaseStart(NamedTuple):
    """A phase of a step begins."""

    step: int
    phase: str


Move = Alloc | Free | PhaseStart | StreamWait | Kernel | MarkKind
"""What happens next: a `Kernel` runs, or one of the marks without further fields stands here."""


@functools.cache
def without_layer_numbers(module: str) -> str:
    """A dotted name with its layers' numbers left open: `encoder.layer.*.output`."""
    return NUMBER.sub("*", module)


@functools.lru_cache(maxsize=1 << 17)
def _stack_of(alloc: Alloc) -> Alloc:
    """Whether a block is a state, and whose, or was temporary is known when the run is over only, so that
    does not tell stacks apart."""
    if alloc.kind not in (Kind.TEMPORARIES, STATES):
        return alloc._replace(module=without_layer_numbers(alloc.module))
    module = "" if alloc.phase == "update" else without_layer_numbers(alloc.module)
    return alloc._replace(module=module, kind="")


@dataclass(frozen=True)
class RelativeTrace:
    """The moves of a recorded run, whose frees name blocks by their place among the live ones."""

    moves: tuple[Move, ...]
    attention: tuple[str, ...]
    """Which attention kernels were chosen."""
    doubts: tuple[str, ...] = ()
    """What the rehearsal had to assume."""
    groups: int = 0
    """As in the trace."""
    has_passes: bool = False
    """Whether the trace says where passes begin (`Trace.passes`)."""

    @classmethod
    def of(cls, trace: Trace, marks: Sequence[Mark] = ()) -> RelativeTrace:
        """This trace's moves. `marks` are all of its recording; without them, kernels, waits and ends of
        steps are left out."""
        moves = tuple(_moves(trace, marks or trace.marks))
        return cls(moves, trace.attention, trace.doubts, trace.groups, bool(trace.passes))

    def trace(self) -> Trace:
        """The trace that has these moves. Raises `LookupError` when a block is freed that is not there."""
        return _absolute(self)


def _moves(trace: Trace, marks: Sequence[Mark]) -> Iterator[Move]:
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
                kernel = kernel._replace(after=())
            order.add(kernel)
            yield kernel
        else:
            yield kind
    yield from _moves_between(trace, start, len(trace.events), live, order)


def _moves_between(trace: Trace, start: int, end: int, live: LiveSet, order: StreamKernels) -> Iterator[Move]:
    streams, awaited, of_graphs = trace.streams, trace.awaited, trace.of_graphs
    for event in trace.events[start:end]:
        if event > 0:
            block = trace.blocks[event - 1]
            stream = streams.get(event - 1, DEFAULT_STREAM) if streams else DEFAULT_STREAM
            if of_graphs and event - 1 in of_graphs:
                stream = GRAPH_STREAM
            alloc: Alloc = tuple.__new__(Alloc, (*block[:4], block[5], stream))
            live.alloc(alloc)
            yield alloc
        elif awaited and (kernels := awaited.get(-event - 1)):
            yield live.free_of(-event - 1)._replace(awaited=order.places(kernels))
        else:
            yield live.free_of(-event - 1)


class StreamKernels:
    """The kernels of one step so far, by their streams."""

    def __init__(self) -> None:
        self._of: list[tuple[int, int]] = []  # of each kernel its stream, and its number there
        self._streams: dict[int, list[int]] = defaultdict(list)

    def add(self, kernel: Kernel) -> None:
        """This one is launched."""
        numbers = self._streams[kernel.stream]
        self._of.append((kernel.stream, len(numbers)))
        numbers.append(len(self._of) - 1)

    def places(self, kernels: Iterable[int]) -> tuple[Place, ...]:
        """Where these kernels are, by their numbers in the step."""
        of = [self._of[number] for number in kernels]
        return tuple(Place(stream, len(self._streams[stream]) - 1 - number) for stream, number in of)

    def numbers(self, places: Iterable[Place]) -> tuple[int, ...]:
        """The numbers in the step of the kernels at these places, ascending. Raises `LookupError` when there
        is none such."""
        return tuple(sorted(self._streams[stream][-1 - since] for stream, since in places))


class LiveSet:
    """The live blocks of a run, on their stacks. Blocks are numbered in the order of their allocation."""

    def __init__(self) -> None:
        self.allocs: list[Alloc] = []
        """Of every block, also of those that were freed."""
        self.stacks: dict[Alloc, list[int]] = defaultdict(list)
        """The live blocks of each stack, oldest first."""

    def alloc(self, alloc: Alloc) -> int:
        """Allocates a block, and gives its number."""
        block = len(self.allocs)
        self.allocs.append(alloc)
        self.stacks[_stack_of(alloc)].append(block)
        return block

    def free(self, free: Free) -> int:
        """The block that this frees. Raises `LookupError` when there is none such."""
        stack, distance, _ = free
        blocks = self.stacks[stack]
        if not 0 <= distance < len(blocks):
            raise LookupError(free)
        return blocks.pop(-1 - distance)

    def free_of(self, block: int) -> Free:
        """Frees this block, and gives the move that does so."""
        stack = _stack_of(self.allocs[block])
        blocks = self.stacks[stack]
        at = len(blocks) - 1
        while blocks[at] != block:  # most often one of the youngest
            at -= 1
        del blocks[at]
        return Free(stack, len(blocks) - at)

    def follow(self, moves: Iterable[Move]) -> range:
        """Allocates and frees as these moves do, and gives the blocks that were allocated."""
        first = len(self.allocs)
        for move in moves:
            if type(move) is Alloc:
                self.alloc(move)
            elif type(move) is Free:
                self.free(move)
        return range(first, len(self.allocs))


def _absolute(relative: RelativeTrace) -> Trace:
    writer = TraceWriter(relative.moves)
    writer.follow(relative.moves)
    return writer.trace(relative)


class TraceWriter:
    """Writes a trace from the moves of a run, a piece after the other. `moves` are all that may come."""

    def __init__(self, moves: Iterable[Move]) -> None:
        self._blocks: list[Block] = []
        self._events: list[int] = []
        self._marks: list[Mark] = []
        self._periods: list[Period] = []
        self._last, self._streams = _SteadyStep(), dict[int, int]()
        self._stacks: dict[Alloc, list[int]] = defaultdict(list)
        self._by_move: dict[int, list[int]] = {}
        """By a move's id: what repeats is the same move, and hashes slowly."""
        self._step, self._phase, self._released = -1, "", False
        self._is_plain = all(map(_is_plain, moves))

    def follow(self, moves: Iterable[Move], step: int | None = None) -> None:
        """Writes these moves; their phases are those of this step, where one is given. Raises `LookupError`
        when a block is freed that is not there."""
        blocks, events, marks, streams = self._blocks, self._events, self._marks, self._streams
        by_move, stacks, last = self._by_move, self._stacks, self._last
        current = self._step
        new, releases, empties = tuple.__new__, MarkKind.CONTEXT_RELEASED, MarkKind.CACHE_EMPTIED
        for move in moves:
            if type(move) is Alloc:
                if move[5] != DEFAULT_STREAM:
                    streams[len(blocks)] = move[5]
                blocks.append(new(Block, (*move[:4], current, move[4])))
                number = len(blocks)
                events.append(number)
                stack = by_move.get(id(move))
                if stack is None:
                    stack = by_move[id(move)] = stacks[_stack_of(move)]
                stack.append(number)
            elif type(move) is Free:
                stack = by_move.get(id(move))
                if stack is None:
                    stack = by_move[id(move)] = stacks[move.stack]
                if not 0 <= move[1] < len(stack):
                    raise LookupError(move)
                number = stack.pop(-1 - move[1])
                _append_free(number, blocks, events)
                if move[2]:
                    last.awaited[number - 1] = last.order.numbers(move[2])
            elif type(move) is PhaseStart:
                begins = move.step if step is None else step
                if begins != current:
                    last = self._last = _SteadyStep()
                current = self._step = begins
                self._phase = move.phase
                last.passes += [len(last.kernels)] * (move.phase in ("forward", "backward"))
                marks.append(Mark(len(events), current, move.phase))
            elif move is empties or (move is releases and not self._released):  # joined parts may each be the
                self._released |= move is releases  # first
                marks.append(Mark(len(events), current, self._phase, move))
            else:
                last.follow(move, len(events), ordered=not self._is_plain)

    def follow_times(self, moves: Sequence[Move], times: int, step: int) -> None:
        """Writes these moves so many times. Once they begin and end with the same live blocks, counted from
        where they begin, each further time is the last one with other numbers."""
        first, written = len(self._blocks), 0
        while written < times:
            further = times - written - 1
            counts = self._counts() if further and self._may_shift(moves) else None
            before = self._live(moves) if counts else {}
            self.follow(moves, step)
            written += 1
            if counts and self._is_shifted(before, len(self._blocks) - counts.blocks, first):
                self._shift(counts, further, first, moves)
                return

    def trace(self, relative: RelativeTrace) -> Trace:
        """The trace of what was written."""
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
            passes=tuple(last.passes) if relative.has_passes else (),
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
            len(last.passes),
        )

    def _may_shift(self, moves: Sequence[Move]) -> bool:
        """Whether these moves may be written again with other numbers alone."""
        return self._is_plain and not any(
            (type(move) is Alloc and (move.kind == STATES or move.stream != DEFAULT_STREAM))
            or move is MarkKind.STEP_END
            for move in moves
        )

    def _live(self, moves: Sequence[Move]) -> dict[int, list[int]]:
        """The live blocks on the stacks that these moves touch."""
        stacks = {id(stack): stack for stack in map(self._stack, moves) if stack is not None}
        return {key: [*stack] for key, stack in stacks.items()}

    def _stack(self, move: Move) -> list[int] | None:
        if type(move) is not Alloc and type(move) is not Free:
            return None
        stack = self._by_move.get(id(move))
        if stack is None:
            key = _stack_of(move) if type(move) is Alloc else move.stack
            stack = self._by_move[id(move)] = self._stacks[key]
        return stack

    def _is_shifted(self, before: Mapping[int, Sequence[int]], by: int, first: int) -> bool:
        """Whether the stacks hold what they held before: blocks that are older than `first`, and others whose
        numbers are larger by so many."""
        stacks = {id(stack): stack for stack in self._stacks.values()}
        return all(
            stacks[key] == [number + by if number > first else number for number in numbers]
            for key, numbers in before.items()
        )

    def _shift(self, counts: _TraceSize, times: int, first: int, moves: Sequence[Move]) -> None:
        """Writes so many times again what was written since these counts."""
        blocks, events, marks, last = self._blocks, self._events, self._marks, self._last
        of_blocks, of_events = blocks[counts.blocks :], events[counts.events :]
        of_marks = marks[counts.marks :]
        of_kernels = last.kernels[counts.kernels :]
        of_waits, of_passes = last.waits[counts.waits :], last.passes[counts.passes :]
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
            last.passes += [start + launches for start in of_passes]
            last.launched += [event + later for event in launched]
        by = times * len(of_blocks)
        for stack in {id(stack): stack for stack in map(self._stack, moves) if stack is not None}.values():
            stack[:] = [number + by if number > first else number for number in stack]


class _TraceSize(NamedTuple):
    """How much of a trace is written."""

    blocks: int
    events: int
    marks: int
    kernels: int
    waits: int
    passes: int


def _is_plain(move: Move) -> bool:
    """Whether this move is of one stream alone."""
    return type(move) is not StreamWait and not (type(move) is Free and move.awaited)


class _SteadyStep:
    """What only the last step of a trace has: its kernels, and who waits for them."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.waits: list[int] = []
        self.launched: list[int] = []
        self.passes: list[int] = []
        self.awaited: dict[int, tuple[int, ...]] = {}
        self.order = StreamKernels()
        self._after: tuple[int, ...] = ()

    def follow(self, move: Move, events: int, *, ordered: bool = True) -> None:
        """This move comes after so many events; kernels are `ordered` where others wait for them."""
        if type(move) is Kernel:
            self.kernels.append(move._replace(after=self._after) if self._after else move)
            self.launched.append(events)
            if ordered:
                self.order.add(move)
            self._after = ()
        elif type(move) is StreamWait:
            self._after = self.order.numbers(move.after)
        elif move is MarkKind.WAIT:
            self.waits.append(len(self.kernels))


def _append_free(number: int, blocks: list[Block], events: list[int]) -> None:
    events.append(-number)
    block = blocks[number - 1]
    if block[5] == STATES:
        # A state is what lives on when the run is over; one that a later step replaces was temporary.
        blocks[number - 1] = block._replace(kind=Kind.TEMPORARIES, module="")
