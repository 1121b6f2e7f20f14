"""What repeats is recorded once and written again: steps after the second, micro-batches but the first ones
and the last.

A step that begins and ends with the same live blocks leaves the device as it found it, and the loop's next
step makes the same requests. So two steps are recorded: states are made at the end of the first, and when the
second ends with what it began with, a third is the second again. Likewise with micro-batches: the first
makes the gradients, the last one's batch goes with it, and of those between them each is like the next, so
three are recorded for any larger number. One of several processes settles a micro-batch later, and all of
its steps are recorded.

That the live blocks are the same is checked on every relative trace (by size, operator, module and phase).
Where they are not, or where it cannot be known that the code keeps no count of its own, nothing is repeated
and the run is simulated in full.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from snugfit.rehearsal.trace.relative import Alloc, Free, Move, PhaseStart, RelativeTrace, TraceWriter
from snugfit.rehearsal.trace.trace import Kernel, Mark, MarkKind, Trace

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup

RECORDED_STEPS = 2
"""Steps that are recorded when more are asked for."""

RECORDED_MICRO_BATCHES = 3
"""Micro-batches that are recorded when more are asked for, of which the last but one is repeated."""

RECORDED_BY_RANKS = 4
"""The same of one of several processes: in the second some kernels still wait for exchanges that only the
first begins with (DDP's buffers)."""


class ShortRun(NamedTuple):
    """What is recorded in the place of a longer run."""

    job: Job
    setup: Setup
    steps: int


def short_run(job: Job, setup: Setup, steps: int, *, steady: bool = False) -> ShortRun | None:
    """The run that stands for one of many micro-batches, with micro-batches of the same size. None where
    there are few of them, unless the steps are known to be `steady`: a run that turns out not to be is
    recorded once more, in full. Of several processes that train together all steps are recorded: in the
    first two DDP makes its buckets."""
    recorded = RECORDED_MICRO_BATCHES if setup.parallel is None else RECORDED_BY_RANKS
    many = setup.micro_batches > recorded
    if setup.records_graphs:
        return None  # each of the first steps is another
    steady = steady and setup.parallel is None
    if job.model.module is not None or not (many or (steady and steps > RECORDED_STEPS)):
        return None
    count = min(setup.micro_batches, recorded)
    small = replace(job, batch_size=job.batch_size // setup.micro_batches * count)
    recorded_steps = min(steps, RECORDED_STEPS) if setup.parallel is None else steps
    return ShortRun(small, replace(setup, micro_batches=count), recorded_steps)


class Piece(NamedTuple):
    """Moves that come one after the other, so many times."""

    moves: Sequence[Move]
    times: int = 1


@dataclass(frozen=True)
class PeriodicRun:
    """A long run, of which what repeats stands here once."""

    build: Sequence[Move]
    """Before the first step."""
    recorded: Sequence[Sequence[Piece]]
    """The first steps, of which the last is repeated."""
    steps: int
    rest: Sequence[Move]
    """After the last step."""
    attention: tuple[str, ...]
    doubts: tuple[str, ...]
    groups: int = 0
    has_passes: bool = False

    def relative(self) -> RelativeTrace:
        """The moves of the whole run, one after the other."""
        whole = [*self.build]
        for index in range(self.steps):
            for moves, times in self.recorded[min(index, len(self.recorded) - 1)]:
                whole += [
                    move._replace(step=index) if type(move) is PhaseStart else move for move in moves
                ] * times
        return RelativeTrace((*whole, *self.rest), self.attention, self.doubts, self.groups, self.has_passes)

    def trace(self) -> Trace:
        """The trace of the whole run. Raises `LookupError` when a block is freed that is not there."""
        pieces = [moves for step in self.recorded for moves, _ in step]
        writer = TraceWriter(itertools.chain(self.build, *pieces, self.rest))
        writer.follow(self.build)
        for index in range(self.steps):
            for moves, times in self.recorded[min(index, len(self.recorded) - 1)]:
                writer.follow_times(moves, times, index)
        writer.follow(self.rest)
        return writer.trace(RelativeTrace((), self.attention, self.doubts, self.groups, self.has_passes))

    def steady_step(self, most: int) -> Trace:
        """The kernels, waits and phases of the last step, no piece of it more often than `most` times."""
        moves = [move for moves, times in self.recorded[-1] for move in list(moves) * min(times, most)]
        kernels: list[Kernel] = []
        waits: list[int] = []
        marks: list[Mark] = []
        for move in (*moves, *self.rest):
            if type(move) is Kernel:
                kernels.append(move)
            elif type(move) is PhaseStart:
                marks.append(Mark(0, *move))
            elif move is MarkKind.WAIT:
                waits.append(len(kernels))
        return Trace((), (), tuple(marks), tuple(kernels), tuple(waits), self.attention, self.doubts)


def repeat(relative: RelativeTrace, *, steps: int, micro_batches: int) -> PeriodicRun | None:
    """The run of `steps` steps of `micro_batches` micro-batches, from a recorded one of as many steps or of
    `RECORDED_STEPS` and of fewer micro-batches; None when that is no steady state."""
    build, recorded, rest = split_steps(relative.moves)
    if len(recorded) not in (steps, min(steps, RECORDED_STEPS)):
        return None
    widened: list[Sequence[Piece]] = []
    for moves in recorded:
        wide = widen(moves, micro_batches)
        if wide is None:
            return None
        widened.append(wide)
    if steps > len(recorded) and not _leaves_as_many(recorded[-1]):
        return None
    return PeriodicRun(
        build, widened, steps, rest, relative.attention, relative.doubts, relative.groups, relative.has_passes
    )


class SplitSteps(NamedTuple):
    """The moves of a run, cut where its steps begin."""

    build: Sequence[Move]
    """Before the first step."""
    steps: list[Sequence[Move]]
    """Each from its first mark to its end."""
    rest: Sequence[Move]
    """After the last step."""


def split_steps(moves: Sequence[Move]) -> SplitSteps:
    """Cuts a run's moves where its steps begin and end."""
    first = next((at for at, move in enumerate(moves) if isinstance(move, PhaseStart) and move.step == 0), 0)
    ends = [first, *(at + 1 for at, move in enumerate(moves) if move is MarkKind.STEP_END)]
    steps = [moves[start:end] for start, end in pairwise(ends)]
    return SplitSteps(moves[:first], steps, moves[ends[-1] :])


def micro_batch_starts(moves: Sequence[Move]) -> list[int]:
    """Where in a step each micro-batch begins: at the load phase before a forward pass."""
    starts = [(at, move.phase) for at, move in enumerate(moves) if isinstance(move, PhaseStart)]
    return [
        at for (at, phase), (_, following) in pairwise(starts) if (phase, following) == ("load", "forward")
    ]


def widen(moves: Sequence[Move], micro_batches: int) -> Sequence[Piece] | None:
    """A step's moves with its last micro-batch but one repeated, or left out where one fewer is asked for;
    None when that one is not steady."""
    starts = micro_batch_starts(moves)
    if len(starts) == micro_batches:
        return [Piece(moves)]
    if len(starts) < RECORDED_MICRO_BATCHES or micro_batches < len(starts) - 1:
        return None
    before_last, last = starts[-2:]
    if not _leaves_as_many(moves[before_last:last]):
        return None
    further = micro_batches - len(starts) + 1
    return [Piece(moves[:before_last]), Piece(moves[before_last:last], further), Piece(moves[last:])]


def _leaves_as_many(moves: Sequence[Move]) -> bool:
    """Whether these moves leave as many live blocks on each stack as there were."""
    allocated = Counter([move.stack for move in moves if type(move) is Alloc])
    return allocated == Counter([move.stack for move in moves if type(move) is Free])
