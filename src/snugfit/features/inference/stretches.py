"""Division of a simulated call of `generate` into parts: building the model, the prefill, and each decode
step.

In such a part (`Stretch`), a free refers to its block by the allocation. If a decode step allocated the
block, the reference is the distance in steps and the number there. For an earlier block, it is its operator,
its module, and its number among the blocks with both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.features.inference.step import DECODE
from snugfit.rehearsal.trace.trace import Block, Kernel, Mark, MarkKind, Trace

if TYPE_CHECKING:
    from snugfit.rehearsal.trace.trace import Recording

MARKS = (MarkKind.CONTEXT_RELEASED, MarkKind.CACHE_EMPTIED)


class DifferentSteps(Exception):
    """Internal exception for two decode steps that differ in more than sizes, so that no interpolation is
    possible. Users never see it.
    """


class EarlyBlock(NamedTuple):
    """Reference to a memory block from before the first decode step, such as a weight."""

    phase: str
    operator: str
    module: str
    number: int
    """Index of the block among those with the same phase, operator and module."""


class LateBlock(NamedTuple):
    """Reference to a memory block that a decode step allocated, by its distance in steps and its number
    there.
    """

    back: int
    """Number of decode steps between the allocation and the free; 0 if both are in one step."""
    number: int
    """Index of the block among those of its decode step."""


BlockId = EarlyBlock | LateBlock


@dataclass
class Stretch:
    """Allocations, frees and kernels of one part of a call of `generate`, such as a decode step."""

    phase: str
    events: list[int | BlockId] = field(default_factory=list)
    """Allocations and frees in order: an allocation is an index of `blocks`, a free is a block_id."""
    blocks: list[Block] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    """Indices of the kernels before which the host waits for the device."""
    marks: list[tuple[int, MarkKind]] = field(default_factory=list)
    """Other marks of the trace, each with the number of events before it."""
    streams: dict[int, int] = field(default_factory=dict)
    """CUDA stream of a block that is not in the default stream, by the block's index."""


def _is_of_loop(block: Block) -> bool:
    return not block.module and "float" not in block.dtype


def _loop_key(block: Block) -> tuple[str, int, str]:
    return block.operator, block.nbytes, block.dtype


@dataclass
class RecordedCall:
    """One simulated call of `generate`, divided into building the model, prefill and decode steps."""

    before: list[Stretch]
    """Events before the first decode step: building, loading and prefill."""
    decode: list[Stretch]
    lasting: frozenset[EarlyBlock]
    """Blocks from before the first decode step that stay allocated after the call, such as workspaces."""
    lasting_operators: frozenset[str]
    """Operators whose blocks from decode steps stay allocated after the call."""
    trace: Trace

    @classmethod
    def of(cls, recording: Recording, decode_steps: int) -> RecordedCall:
        """Return a recorded call, divided into prefill and decode steps. Raises `DifferentSteps` for an
        unexpected structure.
        """
        trace = recording.trace
        stretches = list(_split(recording))
        before = [stretch for stretch in stretches if stretch.phase != DECODE]
        decode = stretches[len(before) : len(before) + decode_steps]
        if len(decode) != decode_steps or any(stretch.phase != DECODE for stretch in decode):
            raise DifferentSteps
        freed = {-event - 1 for event in trace.events[: _end(recording)] if event < 0}
        alive = [
            (block_id, block)
            for number, (block_id, block) in enumerate(zip(_ids(stretches), trace.blocks))
            if number not in freed
        ]
        return cls(
            before,
            decode,
            frozenset(
                stretch
                for stretch, _ in alive
                if isinstance(stretch, EarlyBlock) and stretch.phase != "build"
            ),
            frozenset(block.operator for stretch, block in alive if isinstance(stretch, LateBlock)),
            trace,
        )


def _end(recording: Recording) -> int:
    """Return the number of allocations and frees before the end of a recording's last step."""
    ends = [mark.event for mark in recording.marks if mark.kind is MarkKind.STEP_END]
    return ends[-1] if ends else len(recording.trace.events)


def _split(recording: Recording) -> Iterator[Stretch]:
    """Yield the parts of a recording (`Stretch`) up to the end of its step; frees have absolute block ids."""
    trace, kernels = recording.trace, iter(recording.trace.kernels)
    current = Stretch("build")
    begin, stretch_of = 0, dict[int, tuple[int, int]]()
    stretches: list[Stretch] = [current]
    early: Counter[tuple[str, str, str]] = Counter()
    names: dict[int, BlockId] = {}
    number = 0

    def add(end: int) -> None:
        nonlocal number
        for event in trace.events[begin:end]:
            if event > 0:
                block = trace.blocks[event - 1]
                current.events.append(len(current.blocks))
                if current.phase == DECODE:
                    stretch_of[event - 1] = (number, len(current.blocks))
                else:
                    key = (current.phase, block.operator, block.module)
                    names[event - 1] = EarlyBlock(*key, early[key])
                    early[key] += 1
                if event - 1 in trace.streams:
                    current.streams[len(current.blocks)] = trace.streams[event - 1]
                current.blocks.append(block)
            elif (block_id := stretch_of.get(-event - 1)) is not None:
                current.events.append(LateBlock(number - block_id[0], block_id[1]))
            else:
                current.events.append(names[-event - 1])

    for mark in recording.marks:
        add(mark.event)
        begin = mark.event
        if mark.kind is MarkKind.PHASE:
            # The building and the loading have several marks each.
            if mark.phase == current.phase != DECODE:
                continue
            current = Stretch(mark.phase)
            stretches.append(current)
            number += mark.phase == DECODE
        elif mark.kind is MarkKind.KERNEL:
            current.kernels.append(next(kernels))
        elif mark.kind is MarkKind.WAIT:
            current.waits.append(len(current.kernels))
        elif mark.kind in MARKS:
            current.marks.append((len(current.events), mark.kind))
        elif mark.kind is MarkKind.STEP_END:
            break
    yield from stretches


def _ids(stretches: Sequence[Stretch]) -> Iterator[BlockId]:
    """Yield a reference to each memory block of these parts of a call, in order."""
    early: Counter[tuple[str, str, str]] = Counter()
    for stretch in stretches:
        for number, block in enumerate(stretch.blocks):
            if stretch.phase == DECODE:
                yield LateBlock(0, number)
                continue
            key = (stretch.phase, block.operator, block.module)
            yield EarlyBlock(*key, early[key])
            early[key] += 1


# ---- sizes -------------------------------------------------------------------------------------------------


class StepWindow(NamedTuple):
    """A few successive decode steps that were simulated, with the number of the first."""

    step: int
    """Number of the window's first decode step, counted from 1."""
    steps: Sequence[Stretch]


def is_line(left: StepWindow, middle: StepWindow, right: StepWindow, period: int) -> bool:
    """Return True if sizes and kernels of three windows of decode steps grow linearly, so that others can be
    extrapolated.
    """
    offset, distance = middle.step - left.step, right.step - left.step
    # Sizes that grow in steps longer than this period may still be on a line in all three windows.
    if period == 1 and not _is_on_line(left.steps[0], left.steps[1], right.steps[0], 1, distance):
        return False
    for steps in zip(left.steps[:period], middle.steps[:period], right.steps[:period], strict=True):
        if not _is_on_line(*steps, offset, distance):
            return False
        for first, other, last in zip(*map(_work, steps), strict=True):
            line = first + (last - first) * offset / distance
            if abs(other - line) > MAX_NONLINEARITY * line:
                return False
    return True


def _is_on_line(first: Stretch, middle: Stretch, last: Stretch, offset: int, distance: int) -> bool:
    """Return True if the sizes of `middle`, `offset` steps after `first`, are on the line to `last`,
    `distance` steps after it.
    """
    if not _same_structure(first, middle) or not _same_structure(first, last):
        return False
    sizes = ([block.nbytes for block in step.blocks] for step in (first, middle, last))
    return all((b - a) * distance == (c - a) * offset for a, b, c in zip(*sizes, strict=True))


MAX_NONLINEARITY = 0.002
"""Largest relative difference between a step's work and its linear interpolation. An embedding reads each of
its rows at most once.
"""


def _work(stretch: Stretch) -> tuple[int, int]:
    """Return the total FLOPs and bytes of the kernels in a part of a call."""
    kernels = stretch.kernels
    return sum(kernel.flops for kernel in kernels), sum(kernel.nbytes for kernel in kernels)


def with_tables(steps: Sequence[Stretch], start: Sequence[Stretch]) -> list[Stretch]:
    """Return simulated decode steps with buffers as large as in a long call of beam search, which begins with
    step `start`.

    The loop of a beam search has tables with a column for each new token, and a window has fewer. They are
    the blocks and kernels of the loop that have one size in all steps.
    """
    blocks = _tables(
        *([block for block in step.blocks if _is_of_loop(block)] for step in (*steps[:2], start[0]))
    )
    kernels = _tables(
        *([block for block in step.kernels if not block.module] for step in (*steps[:2], start[0]))
    )
    return [
        replace(
            step,
            blocks=_with_entries(step.blocks, _is_of_loop, blocks),
            kernels=_with_entries(step.kernels, lambda block: not block.module, kernels),
        )
        for step in steps
    ]


def _tables(first: list[Any], second: list[Any], wide: list[Any]) -> dict[int, Any]:
    """Return the buffers that have one size in both steps of a window, by number, with their sizes in the
    long call.
    """
    if not len(first) == len(second) == len(wide):
        return {}
    return {
        number: long
        for number, (one, other, long) in enumerate(zip(first, second, wide, strict=True))
        if one == other and one.operator == long.operator
    }


def _with_entries(
    entries: list[Any], is_of_loop: Callable[[Any], bool], tables: Mapping[int, Any]
) -> list[Any]:
    numbers = count()
    return [tables.get(next(numbers), entry) if is_of_loop(entry) else entry for entry in entries]


def with_tables_of(last: Stretch, before: Stretch, start: Stretch) -> Stretch:
    """Return the last decode step of a window with buffers as large as in a long call, whose step `start` it
    is.

    `before` is the step before it in the window. It names the sizes of tables there. Tables of another size
    stay, which are those of the result.
    """
    short, long = ([block for block in step.blocks if _is_of_loop(block)] for step in (before, start))
    sizes = {_loop_key(block): other.nbytes for block, other in zip(short, long, strict=False)}
    return replace(
        last,
        blocks=[
            block._replace(nbytes=sizes.get(_loop_key(block), block.nbytes)) if _is_of_loop(block) else block
            for block in last.blocks
        ],
    )


def _same_structure(first: Stretch, other: Stretch) -> bool:
    """Return True if two decode steps have the same allocations and kernels, apart from their sizes."""
    return (
        first.events == other.events
        and first.waits == other.waits
        and first.streams == other.streams
        and len(first.blocks) == len(other.blocks)
        and all(a.operator == b.operator and a.module == b.module for a, b in zip(first.blocks, other.blocks))
        and [kernel.operator for kernel in first.kernels] == [kernel.operator for kernel in other.kernels]
    )


def interpolate(
    left: StepWindow, right: StepWindow, period: int, together: int = 1
) -> Iterator[tuple[Stretch, int]]:
    """Yield decode steps that represent all steps from the first of `left` to the one before `right`, each
    with its number of repetitions.

    The middle of `together` periods represents them, because it has their mean sizes. Steps with another
    structure than in `right` have the sizes of `left`.
    """
    distance = right.step - left.step
    lines = [SizeLine.of(*pair) for pair in zip(left.steps[:period], right.steps[:period], strict=True)]
    for begin in range(0, distance, period * together):
        times = min(together, (distance - begin) // period)
        # Positions are counted in half steps, so that the mean of an even number of periods is exact.
        middle = 2 * begin + (times - 1) * period
        for line in lines:
            yield line.at(middle, 2 * distance), times


@dataclass
class SizeLine:
    """Linear interpolation of the sizes of memory blocks and kernels between two decode steps of equal
    structure.
    """

    first: Stretch
    blocks: list[tuple[int, Block, int]]
    kernels: list[tuple[int, Kernel, Kernel]]

    @classmethod
    def of(cls, left: Stretch, right: Stretch) -> SizeLine:
        """Return the memory blocks and kernels whose sizes differ between two decode steps; none for steps of
        different structures.
        """
        if not _same_structure(left, right):
            return cls(left, [], [])
        blocks = enumerate(zip(left.blocks, right.blocks, strict=True))
        kernels = enumerate(zip(left.kernels, right.kernels, strict=True))
        return cls(
            left,
            [(at, a, b.nbytes - a.nbytes) for at, (a, b) in blocks if a.nbytes != b.nbytes],
            [(at, a, b) for at, (a, b) in kernels if a != b],
        )

    def at(self, step: int, distance: int) -> Stretch:
        """Return the interpolated decode step that is `step` of `distance` steps after the first."""
        blocks, kernels = self.first.blocks.copy(), self.first.kernels.copy()
        for at, block, growth in self.blocks:
            blocks[at] = block._replace(nbytes=block.nbytes + growth * step // distance)
        for at, kernel, other in self.kernels:
            kernels[at] = _between(kernel, other, step, distance)
        return replace(self.first, blocks=blocks, kernels=kernels)


def _between(kernel: Kernel, other: Kernel, step: int, distance: int) -> Kernel:
    def at(a: int, b: int) -> int:
        return a + (b - a) * step // distance

    shapes = kernel.shapes
    if [len(shape) for shape in shapes] == [len(shape) for shape in other.shapes]:
        pairs = (zip(a, b, strict=True) for a, b in zip(shapes, other.shapes, strict=True))
        shapes = tuple(tuple(at(a, b) for a, b in pair) for pair in pairs)
    return kernel._replace(
        flops=at(kernel.flops, other.flops),
        nbytes=at(kernel.nbytes, other.nbytes),
        shapes=shapes,
        leading=tuple(map(at, kernel.leading, other.leading)),
    )


# ---- writing -----------------------------------------------------------------------------------------------


class CallWriter:
    """Builds the trace of several equal calls of `generate` from their prefill and decode steps."""

    def __init__(self, start: RecordedCall, end: RecordedCall) -> None:
        self._start, self._lasting, self._names = start, end.lasting, end.lasting_operators
        self._blocks: list[Block] = []
        self._events: list[int] = []
        self._marks: list[Mark] = []
        self._kernels: list[Kernel] = []
        self._waits: list[int] = []
        self._early: dict[BlockId, int] = {}
        self._late: list[list[int]] = []
        self._alive: dict[int, None] = {}
        self._streams: dict[int, int] = {}
        self._call = -1
        self._write(start.before[0], early=True)

    def begin(self, call: int) -> None:
        """Append the prefill of a call, numbered from 0, to the trace. The first call also includes building
        the model.
        """
        self._call, self._late = call, []
        self._kernels, self._waits = [], []
        self._alive = {}
        for stretch in self._start.before[1:]:
            self._write(stretch, early=True)

    def write(self, stretch: Stretch, times: int = 1) -> None:
        """Append a decode step to the trace, with its kernels `times` times."""
        self._write(stretch, early=False)
        for _ in range(times - 1):
            self._write_kernels(stretch)

    def end(self) -> None:
        """Append the frees of a call's remaining memory blocks to the trace. Raises `DifferentSteps` if
        blocks of decode steps are still allocated.
        """
        for block_id in [block_id for block_id, block in self._early.items() if block in self._alive]:
            # The last window has no such block, because it began with other tokens.
            self._free(block_id, [])
        if self._alive:
            raise DifferentSteps

    def _write(self, stretch: Stretch, *, early: bool) -> None:
        begin = len(self._events)
        self._marks.append(Mark(begin, self._call, stretch.phase))
        # The driver releases the reserved address space only once.
        if self._call < 1:
            self._marks += [Mark(begin + at, self._call, stretch.phase, kind) for at, kind in stretch.marks]
        ids = list(_ids([stretch])) if early else [None] * len(stretch.blocks)
        numbers: list[int] = []
        for event in stretch.events:
            if isinstance(event, int):
                self._allocate(stretch.blocks[event], ids[event], numbers)
                if event in stretch.streams:
                    # Each call creates a stream of its own.
                    self._streams[numbers[event]] = stretch.streams[event] + self._call
            else:
                self._free(event, numbers)
        if not early:
            self._late.append(numbers)
        self._write_kernels(stretch)

    def _write_kernels(self, stretch: Stretch) -> None:
        self._waits += [len(self._kernels) + wait for wait in stretch.waits]
        self._kernels += stretch.kernels

    def _allocate(self, block: Block, block_id: BlockId | None, numbers: list[int]) -> None:
        if block_id is None:
            lasts = block.operator in self._names
            block_id = EarlyBlock(DECODE, block.operator, "", 0) if lasts else None
        else:
            lasts = block_id in self._lasting
        # A workspace is allocated only in the first call.
        if lasts and block_id in self._early:
            numbers.append(self._early[block_id])
            return
        index = len(self._blocks)
        self._blocks.append(block if block.step == self._call else block._replace(step=self._call))
        self._events.append(index + 1)
        numbers.append(index)
        if block_id is None:
            self._alive[index] = None
        else:
            self._early[block_id] = index
            if not lasts and self._call >= 0:
                self._alive[index] = None

    def _free(self, block_id: BlockId, numbers: list[int]) -> None:
        try:
            if isinstance(block_id, EarlyBlock):
                # The tokens with which a window's decoder begins do not belong to the long call.
                if block_id not in self._early and block_id.phase == "load":
                    return
                index = self._early[block_id]
            else:
                index = (
                    numbers[block_id.number]
                    if not block_id.back
                    else self._late[-block_id.back][block_id.number]
                )
            if self._call >= 0:
                del self._alive[index]
        except (KeyError, IndexError):
            raise DifferentSteps(block_id) from None
        self._events.append(-(index + 1))

    def trace(self) -> Trace:
        """Return the trace of all calls, with the kernels of the last one."""
        return replace(
            self._start.trace,
            blocks=tuple(self._blocks),
            events=tuple(self._events),
            marks=tuple(self._marks),
            kernels=tuple(self._kernels),
            waits=tuple(self._waits),
            streams=self._streams,
        )
