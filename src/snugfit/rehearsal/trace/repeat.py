"""Repeat the steps and micro-batches of a short recorded run, to obtain the trace of a long one.

A part is repeated only if it leaves the number of live blocks unchanged, for each size, operator, module and
phase. Otherwise, or if the model's code may count its calls, the run is simulated in full.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from snugfit.rehearsal.trace.relative import Alloc, Free, PhaseStart, RelativeTrace, TraceEvent, TraceWriter
from snugfit.rehearsal.trace.trace import Kernel, Mark, MarkKind, Trace
from snugfit.step.step import SKIPPED

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup

# The first step creates the optimizer states. If the second ends with the live blocks of its beginning, it
# repeats.
RECORDED_STEPS = 2
"""Number of optimizer steps to record in place of a longer run."""

# The first micro-batch allocates the gradients, and the last frees its batch. Those between them are equal.
RECORDED_MICRO_BATCHES = 3
"""Number of micro-batches to record for a step with more. The last but one represents the omitted ones."""


class ShortRun(NamedTuple):
    """Job and settings of a short run that is recorded in place of a long one, with numbers of steps and
    micro-batches."""

    job: Job
    setup: Setup
    steps: int
    micro_batches: int
    """Number of micro-batches in a step of the long run that the short run represents."""
    skips: bool = False
    """True if the run has all micro-batches but skips the forward and backward passes of most."""


def whole_run(job: Job, setup: Setup, steps: int) -> ShortRun:
    """Return this run itself as a `ShortRun`, so that it is recorded in full."""
    return ShortRun(job, setup, steps, setup.micro_batches)


def short_run(
    job: Job, setup: Setup, steps: int, *, loop: str = "plain", steady: bool = False, late: float = 0
) -> ShortRun | None:
    """Return the short run that represents one with many micro-batches of the same size, or None.

    Return None for few micro-batches, unless the steps are known to be `steady`. If the recording is not
    periodic, the run is recorded again in full. `late` is the number of additional micro-batches before equal
    ones follow. If it is not 0, all steps are recorded, since steps may become equal late too. The Trainer's
    loop loads all micro-batches of a step at its start, so it runs all of them and skips passes.
    """
    recorded = RECORDED_MICRO_BATCHES + late
    many = setup.micro_batches > recorded
    if setup.records_graphs:
        return None  # the first steps differ from each other
    steady = steady and not late
    # A user's module may count its calls, so its steps are recorded in full.
    if job.model.module is not None or not (many or (steady and steps > RECORDED_STEPS)):
        return None
    count = int(min(setup.micro_batches, recorded))
    skips = loop == "trainer"
    if skips and late:
        return None
    # The batch shrinks with the micro-batches, so that each has its size in the long run.
    small, few = (job, setup) if skips else setup.in_pieces(count, job)
    # If micro-batches settle late, steps may too, so all of them are recorded.
    recorded_steps = steps if late else min(steps, RECORDED_STEPS)
    return ShortRun(small, few, recorded_steps, setup.micro_batches, skips and many)


class Piece(NamedTuple):
    """Consecutive events of a run, such as those of one micro-batch, and the number of their repetitions."""

    moves: Sequence[TraceEvent]
    times: int = 1


@dataclass(frozen=True)
class PeriodicRun:
    """Events of a long run, in which the last recorded step is repeated until there are `steps` steps."""

    build: Sequence[TraceEvent]
    """Events before the first step, such as the model's construction."""
    recorded: Sequence[Sequence[Piece]]
    """Events of the recorded steps. The last recorded step represents all later ones."""
    steps: int
    rest: Sequence[TraceEvent]
    """Events after the last step."""
    attention: tuple[str, ...]
    doubts: tuple[str, ...]
    groups: int = 0

    def relative(self) -> RelativeTrace:
        """Return the events of the whole run in order, as a relative trace."""
        whole = [*self.build]
        for index in range(self.steps):
            for events, times in self.recorded[min(index, len(self.recorded) - 1)]:
                whole += [
                    event._replace(step=index) if type(event) is PhaseStart else event for event in events
                ] * times
        return RelativeTrace((*whole, *self.rest), self.attention, self.doubts, self.groups)

    def trace(self) -> Trace:
        """Return the trace of the whole run. Raise `LookupError` if an event frees a block that
        is not live.
        """
        pieces = [events for step in self.recorded for events, _ in step]
        writer = TraceWriter(itertools.chain(self.build, *pieces, self.rest))
        writer.follow(self.build)
        for index in range(self.steps):
            for events, times in self.recorded[min(index, len(self.recorded) - 1)]:
                writer.follow_times(events, times, index)
        writer.follow(self.rest)
        return writer.trace(RelativeTrace((), self.attention, self.doubts, self.groups))

    def steady_step(self, most: int) -> Trace:
        """Return a trace with only the kernels, waits and phases of the last step. Each repeated micro-batch
        occurs at most `most` times.
        """
        # Copies of the list repeat its moves as the same objects, which `TraceWriter` reuses.
        events = [event for events, times in self.recorded[-1] for event in list(events) * min(times, most)]
        kernels: list[Kernel] = []
        waits: list[int] = []
        marks: list[Mark] = []
        for event in (*events, *self.rest):
            if type(event) is Kernel:
                kernels.append(event)
            elif type(event) is PhaseStart:
                # Only the order of phases matters here, so the marks have no event.
                marks.append(Mark(0, *event))
            elif event is MarkKind.WAIT:
                waits.append(len(kernels))
        return Trace((), (), tuple(marks), tuple(kernels), tuple(waits), self.attention, self.doubts)


def repeat(relative: RelativeTrace, *, steps: int, micro_batches: int) -> PeriodicRun | None:
    """Extend a short recording to a run of `steps` steps with `micro_batches` micro-batches. Return it, or
    None if its steps do not repeat.

    The recording has `steps` or `RECORDED_STEPS` steps, and may have fewer micro-batches.
    """
    build, recorded, rest = split_steps(relative.moves)
    if len(recorded) not in (steps, min(steps, RECORDED_STEPS)):
        return None
    widened: list[Sequence[Piece]] = []
    for events in recorded:
        wide = widen(events, micro_batches)
        if wide is None:
            return None
        widened.append(wide)
    if steps > len(recorded) and not _leaves_as_many(recorded[-1]):
        return None
    return PeriodicRun(build, widened, steps, rest, relative.attention, relative.doubts, relative.groups)


class SplitSteps(NamedTuple):
    """The events of a run, split where its steps begin."""

    build: Sequence[TraceEvent]
    """Events before the first step."""
    steps: list[Sequence[TraceEvent]]
    """Events of each step."""
    rest: Sequence[TraceEvent]
    """Events after the last step."""


def split_steps(events: Sequence[TraceEvent]) -> SplitSteps:
    """Split the events of a run where its steps begin and end."""
    first = next(
        (at for at, event in enumerate(events) if isinstance(event, PhaseStart) and event.step == 0), 0
    )
    ends = [first, *(at + 1 for at, event in enumerate(events) if event is MarkKind.STEP_END)]
    steps = [events[start:end] for start, end in pairwise(ends)]
    return SplitSteps(events[:first], steps, events[ends[-1] :])


def micro_batch_starts(events: Sequence[TraceEvent]) -> list[int]:
    """Return the indices at which micro-batches begin: at the load phase before a forward pass.

    The HF Trainer loads all micro-batches at the start of a step. Its later micro-batches begin at a forward
    pass after a `clip` phase, or where that pass is skipped.
    """
    starts = [(at, event.phase) for at, event in enumerate(events) if isinstance(event, PhaseStart)]
    return [
        at if phase == "load" else forward
        for (at, phase), (forward, following) in pairwise(starts)
        if phase in ("load", "clip") and following in ("forward", SKIPPED)
    ]


def widen(events: Sequence[TraceEvent], micro_batches: int) -> Sequence[Piece] | None:
    """Return the events of a step with `micro_batches` micro-batches: the last but one is repeated, or left
    out for one fewer.

    Return None if that micro-batch is not periodic.
    """
    starts = micro_batch_starts(events)
    if len(starts) == micro_batches:
        return _fill_skipped(events, starts)
    # If the last micro-batch but one is omitted, the events are those of one micro-batch fewer.
    if len(starts) < RECORDED_MICRO_BATCHES or micro_batches < len(starts) - 1:
        return None
    before_last, last = starts[-2:]
    if not _leaves_as_many(events[before_last:last]):
        return None
    further = micro_batches - len(starts) + 1
    return [Piece(events[:before_last]), Piece(events[before_last:last], further), Piece(events[last:])]


def _fill_skipped(events: Sequence[TraceEvent], starts: Sequence[int]) -> Sequence[Piece] | None:
    """Return a step's events with each skipped micro-batch replaced by a copy of the last one before. Return
    None if these micro-batches do not repeat.
    """
    phases = [event.phase if isinstance(event := events[at], PhaseStart) else "" for at in starts]
    skipped = [number for number, phase in enumerate(phases) if phase == SKIPPED]
    if not skipped:
        return [Piece(events)]
    like, first, end = (starts[number] for number in (skipped[0] - 1, skipped[0], skipped[-1] + 1))
    if not (_leaves_as_many(events[like:first]) and _leaves_as_many(events[first:end])):
        return None
    return [Piece(events[:like]), Piece(events[like:first], 1 + len(skipped)), Piece(events[end:])]


def _leaves_as_many(events: Sequence[TraceEvent]) -> bool:
    """Return True if these events leave the number of live blocks unchanged, for each stack (blocks with
    equal properties)."""
    # Equal counts per stack suffice, since a stack identifies blocks only by their position.
    allocated = Counter([event.stack for event in events if type(event) is Alloc])
    return allocated == Counter([event.stack for event in events if type(event) is Free])
