"""A relative trace: the same run, written so that pieces of it can be repeated, left out and joined.

A trace names a free by the number of the block, and such numbers change with everything that comes before. A
relative trace says instead *which of the live blocks* is freed. All blocks that are allocated alike (same
size, operator, module, phase and kind; layers of one stack count as one module) lie on one stack, and a free
names the stack and the distance from its top. Backward passes free the youngest first, optimizers the oldest
or the youngest, and so the same moves fit every layer, every micro-batch and every step. Phases, kernels,
waits and ends of steps stand among the moves where they happened.

`RelativeTrace.of(trace, marks).trace()` is that trace again, in every field; law 5's tests hold it to that.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from snugfit.rehearsal.trace.trace import Block, Kernel, Mark, MarkKind, Trace
from snugfit.results.footprint import Kind

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A layer's number in a dotted name."""

STATES: str = Kind.OPTIMIZER_STATES


class Alloc(NamedTuple):
    """A block is allocated; the fields are those of `Block`, but for the step."""

    nbytes: int
    operator: str
    module: str
    phase: str
    kind: str

    @property
    def stack(self) -> Alloc:
        """The stack that the block is put on, named by what its blocks have in common."""
        return _stack_of(self)


class Free(NamedTuple):
    """A live block is freed."""

    stack: Alloc
    stack_distance: int
    """How many blocks of its stack are younger."""


class PhaseStart(NamedTuple):
    """A phase of a step begins."""

    step: int
    phase: str


Move = Alloc | Free | PhaseStart | Kernel | MarkKind
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

    @classmethod
    def of(cls, trace: Trace, marks: Sequence[Mark] = ()) -> RelativeTrace:
        """This trace's moves. `marks` are all of its recording; without them, kernels, waits and ends of
        steps are left out."""
        return cls(tuple(_moves(trace, marks or trace.marks)), trace.attention, trace.doubts)

    def trace(self) -> Trace:
        """The trace that has these moves. Raises `LookupError` when a block is freed that is not there."""
        return _absolute(self)


def _moves(trace: Trace, marks: Sequence[Mark]) -> Iterator[Move]:
    live, kernels = LiveSet(), iter(trace.kernels)
    start = 0
    for end, step, phase, kind in marks:
        yield from _moves_between(trace, start, end, live)
        start = end
        if kind is MarkKind.PHASE:
            yield PhaseStart(step, phase)
        else:
            yield next(kernels) if kind is MarkKind.KERNEL else kind
    yield from _moves_between(trace, start, len(trace.events), live)


def _moves_between(trace: Trace, start: int, end: int, live: LiveSet) -> Iterator[Move]:
    for event in trace.events[start:end]:
        if event > 0:
            block = trace.blocks[event - 1]
            alloc: Alloc = tuple.__new__(Alloc, (*block[:4], block[5]))
            live.alloc(alloc)
            yield alloc
        else:
            yield live.free_of(-event - 1)


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
        stack, distance = free
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
    blocks: list[Block] = []
    events: list[int] = []
    marks: list[Mark] = []
    kernels: list[Kernel] = []
    waits: list[int] = []
    stacks: dict[Alloc, list[int]] = defaultdict(list)
    by_move: dict[int, list[int]] = {}  # by a move's id: what repeats is the same move, and hashes slowly
    step, phase, released = -1, "", False
    new, releases, wait = tuple.__new__, MarkKind.CONTEXT_RELEASED, MarkKind.WAIT
    empties = MarkKind.CACHE_EMPTIED
    for move in relative.moves:
        if type(move) is Alloc:
            blocks.append(new(Block, (*move[:4], step, move[4])))
            number = len(blocks)
            events.append(number)
            stack = by_move.get(id(move))
            if stack is None:
                stack = by_move[id(move)] = stacks[_stack_of(move)]
            stack.append(number)
        elif type(move) is Free:
            stack = by_move.get(id(move))
            if stack is None:
                stack = by_move[id(move)] = stacks[move[0]]
            if not 0 <= move[1] < len(stack):
                raise LookupError(move)
            _append_free(stack.pop(-1 - move[1]), blocks, events)
        elif type(move) is Kernel:
            kernels.append(move)
        elif type(move) is PhaseStart:
            if move.step != step:  # only the last step's kernels and waits count
                kernels.clear()
                waits.clear()
            step, phase = move
            marks.append(Mark(len(events), step, phase))
        elif move is wait:
            waits.append(len(kernels))
        elif move is releases and not released:  # joined parts may each have been the first
            released = True
            marks.append(Mark(len(events), step, phase, releases))
        elif move is empties:
            marks.append(Mark(len(events), step, phase, empties))
    return Trace(
        tuple(blocks),
        tuple(events),
        tuple(marks),
        tuple(kernels),
        tuple(waits),
        relative.attention,
        relative.doubts,
    )


def _append_free(number: int, blocks: list[Block], events: list[int]) -> None:
    events.append(-number)
    block = blocks[number - 1]
    if block[5] == STATES:
        # A state is what lives on when the run is over; one that a later step replaces was temporary.
        blocks[number - 1] = block._replace(kind=Kind.TEMPORARIES, module="")
