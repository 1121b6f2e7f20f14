"""A trace as a score: the same moves, written so that pieces of it can be repeated, lengthened and joined.

A trace names a death by the number of the block that dies, and such numbers change with everything that comes
before. A score says instead *which of the living* dies: of all living blocks that were born alike (same size,
operator, module, phase and kind; layers of one stack count as alike), the one with so many younger ones
behind it. Backward passes kill the youngest first, optimizers the oldest or the youngest, and so the same
words fit every layer, every micro-batch and every step. Kernels, waits for the device and ends of steps
stand among the moves where they happened.

`Score.of(trace, notes).trace()` is that trace again, in every field; law 5's tests hold it to that.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from snugfit.rehearsal.trace.trace import Block, Kernel, Mark, Trace
from snugfit.results.footprint import Kind

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A layer's number in a dotted name."""


NEVER = sys.maxsize
"""Later than any event."""

STATES: str = Kind.OPTIMIZER_STATES


class Note(NamedTuple):
    """Something that is neither birth nor death, and where in the run it happened."""

    events: int
    """Births and deaths before it."""
    marks: int
    """Marks before it."""
    what: str
    """`kernel` (the next of the trace's), `wait`, or `end` of an optimizer step."""


class Birth(NamedTuple):
    """A block is born."""

    nbytes: int
    operator: str
    module: str
    phase: str
    kind: str

    @property
    def alike(self) -> Birth:
        """What all blocks share that are born as this one is, whichever layer they belong to. Whether one is
        a state, and whose, or was temporary is known when the run is over only, so it tells none apart."""
        return _alike(self)


class Death(NamedTuple):
    """A block dies: the living one, of those alike, that has `younger` younger ones."""

    alike: Birth
    younger: int


class Entry(NamedTuple):
    """A phase begins."""

    step: int
    phase: str


class Run(NamedTuple):
    """A kernel of the steady step runs."""

    kernel: Kernel


class Wait(NamedTuple):
    """The host waits for the device."""


class End(NamedTuple):
    """An optimizer step has ended."""


Move = Birth | Death | Entry | Run | Wait | End


@functools.cache
def folded(module: str) -> str:
    """A dotted name with its layers' numbers left open: `encoder.layer.*.output`."""
    return NUMBER.sub("*", module)


@functools.lru_cache(maxsize=1 << 17)
def _alike(birth: Birth) -> Birth:
    if birth.kind not in (Kind.TEMPORARIES, STATES):
        return birth._replace(module=folded(birth.module))
    module = "" if birth.phase == "update" else folded(birth.module)
    return birth._replace(module=module, kind="")


@dataclass(frozen=True)
class Score:
    """The moves of a rehearsed run."""

    moves: tuple[Move, ...]
    attention: tuple[str, ...]
    """Which attention kernels were chosen."""
    doubts: tuple[str, ...] = ()

    @classmethod
    def of(cls, trace: Trace, notes: Iterable[Note] = ()) -> Score:
        """This trace's score; `notes` say where kernels, waits and ends stand among its events."""
        return cls(tuple(_moves(trace, list(notes))), trace.attention, trace.doubts)

    def trace(self) -> Trace:
        """The trace that has these moves."""
        return _Writer().write(self)


def _moves(trace: Trace, notes: Sequence[Note]) -> Iterator[Move]:
    living = Living()
    names: dict[int, Birth] = {}
    kernels = iter(trace.kernels)
    blocks, marks = trace.blocks, trace.marks
    unborn = 0  # blocks without bytes have no event: they are born as early as their mark allows
    mark = note = 0
    next_note = notes[0][0] if notes else NEVER
    next_mark = marks[0].event if marks else NEVER
    for position in range(len(trace.events) + 1):
        while position >= next_note or position >= next_mark:
            if position >= next_note and notes[note][:2] <= (position, mark):
                yield _noted(notes[note], kernels)
                note += 1
                next_note = notes[note][0] if note < len(notes) else NEVER
            elif position >= next_mark:
                yield Entry(marks[mark].step, marks[mark].phase)
                mark += 1
                next_mark = marks[mark].event if mark < len(marks) else NEVER
            else:
                break
            while _empty_here(trace, unborn, mark):
                yield _birth(blocks[unborn])
                unborn += 1
        if position == len(trace.events):
            return
        event = trace.events[position]
        if event < 0:
            yield living.death(-event, names[-event])
            continue
        while unborn < event:
            birth = _birth(blocks[unborn])
            yield birth
            unborn += 1
        names[event] = alike = _alike(birth)
        living.alike[alike].append(event)
        while unborn < len(blocks) and not blocks[unborn].nbytes and _empty_here(trace, unborn, mark):
            yield _birth(blocks[unborn])
            unborn += 1


def _empty_here(trace: Trace, index: int, marks: int) -> bool:
    if index >= len(trace.blocks) or trace.blocks[index].nbytes:
        return False
    block, mark = trace.blocks[index], trace.marks[marks - 1]
    return (block.step, block.phase) == (mark.step, mark.phase)


def _birth(block: Block) -> Birth:
    return tuple.__new__(Birth, (*block[:4], block[5]))


def _noted(note: Note, kernels: Iterator[Kernel]) -> Move:
    if note.what == "kernel":
        return Run(next(kernels))
    return Wait() if note.what == "wait" else End()


class Living:
    """The living blocks, those born alike together, oldest first."""

    def __init__(self) -> None:
        self.alike: dict[Birth, list[int]] = defaultdict(list)

    def born(self, block: int, alike: Birth) -> None:
        """`block` lives from here on."""
        self.alike[alike].append(block)

    def death(self, block: int, alike: Birth) -> Death:
        """`block` lives no more; says which of those alike it was."""
        living = self.alike[alike]
        place = len(living) - 1
        while living[place] != block:  # most often one of the youngest
            place -= 1
        del living[place]
        return Death(alike, len(living) - place)

    def dies(self, death: Death) -> int:
        """The block that this death kills; raises `LookupError` when there is none such."""
        alike, younger = death
        living = self.alike[alike]
        if not 0 <= younger < len(living):
            raise LookupError(death)
        return living.pop(-1 - younger)

    def census(self) -> dict[Birth, int]:
        """How many live of each that are alike."""
        return {alike: len(living) for alike, living in self.alike.items() if living}


class _Writer:
    """Writes moves onto a trace."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.events: list[int] = []
        self.marks: list[Mark] = []
        self.kernels: list[Kernel] = []
        self.waits: list[int] = []
        self.living: dict[Birth, list[int]] = defaultdict(list)

    def write(self, score: Score) -> Trace:
        step = -1
        blocks, events, by_alike = self.blocks, self.events, self.living
        alike: dict[int, list[int]] = {}  # by a move's id: what repeats is the same move, and hashes slowly
        new = tuple.__new__
        for move in score.moves:
            if type(move) is Birth:
                blocks.append(new(Block, (*move[:4], step, move[4])))
                if move[0]:
                    events.append(len(blocks))
                    living = alike.get(id(move))
                    if living is None:
                        living = alike[id(move)] = by_alike[_alike(move)]
                    living.append(len(blocks))
            elif type(move) is Death:
                living = alike.get(id(move))
                if living is None:
                    living = alike[id(move)] = by_alike[move[0]]
                if not 0 <= move[1] < len(living):
                    raise LookupError(move)
                self._bury(living.pop(-1 - move[1]))
            elif type(move) is Run:
                self.kernels.append(move[0])
            elif type(move) is Entry:
                if move.step != step:  # only the last step's kernels and waits count
                    step = move.step
                    self.kernels.clear()
                    self.waits.clear()
                self.marks.append(Mark(len(events), step, move.phase))
            elif type(move) is Wait:
                self.waits.append(len(self.kernels))
        return Trace(
            tuple(self.blocks),
            tuple(self.events),
            tuple(self.marks),
            tuple(self.kernels),
            tuple(self.waits),
            score.attention,
            score.doubts,
        )

    def _bury(self, number: int) -> None:
        self.events.append(-number)
        block = self.blocks[number - 1]
        if block[5] == STATES:
            # A state is what lives on when the run is over; one that a later step replaces was temporary.
            self.blocks[number - 1] = block._replace(kind=Kind.TEMPORARIES, module="")
