"""The phases and micro-batches of a step, as intervals of the curve of live bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from operator import attrgetter
from typing import NamedTuple

from snugfit.results.prediction import CurvePoint


class Passage(NamedTuple):
    """A contiguous part of a step, such as a phase or a micro-batch, by its begin and end on the curve of
    live bytes.
    """

    name: str
    """Name of the phase, a micro-batch's number, or the number of micro-batches."""

    start: float
    """Begin of the passage, as a share of the step's allocations and frees."""

    end: float
    """Begin of the next passage, as a share of the step's allocations and frees."""


def phase_passages(curve: Sequence[CurvePoint]) -> list[Passage]:
    """Return each contiguous part of a phase in order; together they cover the step."""
    firsts = [(phase, next(points).position) for phase, points in groupby(curve, key=attrgetter("phase"))]
    starts = [0.0, *(position for _, position in firsts[1:]), 1.0]
    return [Passage(name, *ends) for (name, _), ends in zip(firsts, pairwise(starts), strict=True)]


def micro_batch_passages(curve: Sequence[CurvePoint], micro_batches: int, least: float) -> list[Passage]:
    """Return the step's micro-batches by number, each from its forward to its backward pass.

    One passage covers all of them if one is shorter than the share `least` of the step. A single micro-batch
    gives none.
    """
    phases = phase_passages(curve)
    passages = [
        Passage("", forward.start, backward.end)
        for forward, backward in pairwise(phases)
        if (forward.name, backward.name) == ("forward", "backward")
    ]
    if micro_batches < 2 or not passages:
        return []
    shortest = min(passage.end - passage.start for passage in passages)
    if len(passages) != micro_batches or shortest < least:
        return [Passage(f"{micro_batches:,} micro-batches", passages[0].start, passages[-1].end)]
    return [passage._replace(name=f"{number}") for number, passage in enumerate(passages, 1)]
