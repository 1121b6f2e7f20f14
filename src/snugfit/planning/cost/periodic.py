"""A step of many micro-batches through the allocator, from one of few.

All micro-batches of a step but its first and its last are one list of requests, over and over. Once one of
them begins as an earlier one did, block by block and address by address, those between them are a period:
every so many further ones leave the allocator as they find it, and no peak moves any more. (Often it is each
single one; where the blocks of one batch are still alive when those of the next are made, it is every second
or third.) So a few are replayed, and where every step has such a period, they tell what a larger number
takes, to the byte. Where one has none, all are replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

from snugfit.prediction.allocator import Replay, replay
from snugfit.rehearsal.trace.trace import Work

if TYPE_CHECKING:
    from snugfit.rehearsal.trace.trace import Trace

FEW = (6, 7, 8)
"""Micro-batches that are replayed for a number that is larger by a multiple of the period: any number is that
to one of these, be the period one, two or three."""

MANY = 2 * max(FEW)
"""Micro-batches from which on that is less work."""


def replay_periodic(trace: Trace, micro_batches: int, *, expandable: bool) -> Replay | None:
    """What the allocator shows after steps of so many micro-batches, from a trace with a few of them; None
    where those do not tell."""
    starts = list(_micro_batch_starts(trace))
    after = replay(trace, expandable=expandable, states={event for step in starts for event in step})
    is_periodic = (
        any(
            after.states[step[one]] == after.states[step[other]]
            for one, other in combinations(range(1, len(step)), 2)
            if (micro_batches - len(step)) % (other - one) == 0
        )
        for step in starts
    )
    return after if all(is_periodic) else None


def _micro_batch_starts(trace: Trace) -> Iterator[list[int]]:
    """Of each step, after how many events each of its micro-batches begins."""
    steps: dict[int, list[int]] = {}
    for mark, following in pairwise(trace.phases):
        if (mark.phase, following.phase) == ("load", "forward"):
            steps.setdefault(mark.step, []).append(mark.event)
    yield from steps.values()


def micro_batch_works(trace: Trace, micro_batches: int) -> list[Work]:
    """What the device does in each micro-batch of a steady step with so many, the update with the last one;
    the trace may have fewer, if it has more than two."""
    starts = [
        index
        for index, (before, kernel) in enumerate(pairwise(trace.kernels), start=1)
        if kernel.phase == "load" != before.phase
    ]
    works = [_between(trace, *ends) for ends in pairwise([0, *starts, len(trace.kernels)])]
    if len(works) == micro_batches:
        return works
    return [works[0], *[works[1]] * (micro_batches - 2), works[-1]]


def _between(trace: Trace, start: int, end: int) -> Work:
    last = end == len(trace.kernels)
    waits = (index - start for index in trace.waits if start <= index < end or (last and index == end))
    return Work(trace.kernels[start:end], tuple(waits))
