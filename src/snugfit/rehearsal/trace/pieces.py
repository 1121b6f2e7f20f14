"""What a run did, piece by piece: the passes of each of its micro-batches, and its updates.

What the run makes for good counts as if it had always been there: so the first piece is like any later one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from snugfit.rehearsal.trace.score import folded

if TYPE_CHECKING:
    from snugfit.rehearsal.trace.score import Note
    from snugfit.rehearsal.trace.trace import Kernel, Mark, Trace


class Work(NamedTuple):
    """What the device does."""

    kernels: tuple[Kernel, ...] = ()
    waits: tuple[int, ...] = ()
    """Before which of them the host waits."""

    def then(self, other: Work) -> Work:
        """This, and the other after it."""
        waits = (len(self.kernels) + place for place in other.waits)
        return Work(self.kernels + other.kernels, (*self.waits, *waits))


class Piece(NamedTuple):
    """A stretch of a run: the passes of one micro-batch, or an update."""

    number: int
    """Of the micro-batch in its step, from 1; 0 for an update."""
    levels: Mapping[str, int]
    """Most live bytes at the births in each phase and module."""
    after: int
    """Live bytes at its end."""
    work: Work


def pieces_in(trace: Trace, notes: Sequence[Note]) -> Iterator[Piece]:
    """The micro-batches and updates of a run, in order, as if what it makes for good had been there before:
    without those births, and without the kernels that do nothing else."""
    over = notes[-1].events  # the last step's end
    lasting = _lasting(trace.events[:over])
    all_made = max((place for place in range(over) if trace.events[place] in lasting), default=0) + 1
    live, kernels = _live(trace, lasting), iter(trace.kernels)
    numbers = _numbers(trace.marks)
    starts = [place for place, number in enumerate(numbers) if number >= 0 and number != numbers[place - 1]]
    ends = [*starts[1:], len(numbers)]
    queue = deque(notes)
    for start, end in zip(starts, ends, strict=True):
        ran: list[Kernel] = []
        waits: list[int] = []
        before = trace.marks[start].event
        while queue and queue[0].marks <= end:
            note = queue.popleft()
            if note.what == "kernel":
                kernel = next(kernels)
                if before >= all_made or not _only_lasts(trace, before, note.events, lasting, kernel):
                    ran.append(kernel)
                before = note.events
            elif note.what == "wait":
                waits.append(len(ran))
        first = trace.marks[start].event
        last = trace.marks[end].event if end < len(numbers) else over
        work = Work(tuple(ran), tuple(waits))
        yield Piece(numbers[start], _levels(trace, live, lasting, first, last), live[last - 1], work)


def _lasting(events: Sequence[int]) -> set[int]:
    """The births of what is still there at the end."""
    return {event for event in events if event > 0} - {-event for event in events if event < 0}


def _live(trace: Trace, lasting: Set[int]) -> list[int]:
    """Live bytes after each event, with all that lasts there from the beginning."""
    sizes = [block.nbytes for block in trace.blocks]
    changes = (
        0 if event in lasting else sizes[event - 1] if event > 0 else -sizes[-event - 1]
        for event in trace.events
    )
    return list(accumulate(changes, initial=sum(sizes[event - 1] for event in lasting)))[1:]


def _only_lasts(trace: Trace, start: int, end: int, lasting: Set[int], kernel: Kernel) -> bool:
    """Whether nothing was born since the kernel before but what this one made, and all of that lasts."""
    births = {event for event in trace.events[start:end] if event > 0}
    makers = {trace.blocks[birth - 1].operator for birth in births}
    return makers == {kernel.operator} and births <= lasting


def _levels(trace: Trace, live: Sequence[int], lasting: Set[int], start: int, end: int) -> dict[str, int]:
    levels: dict[str, int] = defaultdict(int)
    for place in range(start, end):
        if (event := trace.events[place]) > 0 and event not in lasting:
            block = trace.blocks[event - 1]
            where = f"{block.phase} {folded(block.module)}"
            levels[where] = max(levels[where], live[place])
    return dict(levels)


def _numbers(marks: Sequence[Mark]) -> list[int]:
    """Of each mark, which micro-batch of its step it belongs to; 0 for the update, -1 for the build."""
    found = [-1]
    for before, mark in pairwise(marks):
        if mark.step < 0:
            found.append(-1)
        elif mark.phase == "update":
            found.append(0)
        elif before.phase in ("update", "build"):
            found.append(1)
        else:
            found.append(found[-1] + ((before.phase, mark.phase) == ("backward", "load")))
    return found
