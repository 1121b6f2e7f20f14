"""What repeats is rehearsed once and written again: steps after the second, micro-batches after the second.

A step that begins and ends with the same living blocks leaves the device as it found it, and the loop's next
step asks the same of it. So two steps are rehearsed: states are born at the end of the first, and when the
second ends with what it began with, a third is the second again. Likewise with micro-batches: the first
gives birth to the gradients, the last one's batch dies with it, and of those between them each is like the
next, so three are rehearsed for any larger number.

That the living are the same is checked on every score (by size, operator, module and phase). Where they are
not, or where it cannot be known that the code keeps no count of its own, nothing is repeated and the run is
rehearsed whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from snugfit.rehearsal.trace.score import Birth, Death, End, Entry, Move, Score

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup

STEPS = 2
"""Steps that are rehearsed when more are asked for."""

MICRO_BATCHES = 3
"""Micro-batches that are rehearsed when more are asked for."""


def fewer(job: Job, setup: Setup, steps: int) -> tuple[Job, Setup, int]:
    """What to rehearse instead of a job of many micro-batches, of the same size each. With few of them a
    third step costs no more than writing it again, and nothing is left out."""
    pieces = setup.micro_batches
    if pieces <= MICRO_BATCHES or job.model.module is not None:
        return job, setup, steps
    small = replace(job, batch_size=job.batch_size // pieces * MICRO_BATCHES)
    return small, replace(setup, micro_batches=MICRO_BATCHES), min(steps, STEPS)


def repeated(score: Score, *, steps: int, micro_batches: int) -> Score | None:
    """The score of `steps` steps of `micro_batches` pieces, from one of `STEPS` steps and at most
    `MICRO_BATCHES` pieces; None when that is no steady state."""
    build, rounds, rest = cut(score.moves)
    if len(rounds) != min(steps, STEPS):
        return None
    living = Counter[Birth]()
    count(living, build)
    after = []
    wide: list[list[Move]] = []
    for moves in rounds:
        widened = _widened(moves, living.copy(), micro_batches)
        if widened is None:
            return None
        wide.append(widened)
        count(living, moves)
        after.append(living.copy())
    if steps > STEPS and _standing(after[-1]) != _standing(after[-2]):
        return None
    found = [*build]
    for index in range(steps):
        found += [
            move._replace(step=index) if type(move) is Entry else move for move in wide[min(index, STEPS - 1)]
        ]
    return replace(score, moves=(*found, *rest))


def count(living: Counter[Birth], moves: Sequence[Move]) -> None:
    """Counts the living through these moves, in place."""
    for move in moves:
        if type(move) is Birth:
            living[move.alike] += bool(move.nbytes)
        elif type(move) is Death:
            living[move.alike] -= 1


def _standing(living: Counter[Birth]) -> dict[Birth, int]:
    """Those of which there are any: counters compare slowly."""
    return {alike: number for alike, number in living.items() if number}


Cut = tuple[Sequence[Move], list[Sequence[Move]], Sequence[Move]]


def cut(moves: Sequence[Move]) -> Cut:
    """The build, each step from its first mark to its end, and what comes after the last."""
    first = next((place for place, move in enumerate(moves) if isinstance(move, Entry) and move.step == 0), 0)
    ends = [first, *(place + 1 for place, move in enumerate(moves) if type(move) is End)]
    rounds = [moves[start:end] for start, end in pairwise(ends)]
    return moves[:first], rounds, moves[ends[-1] :]


def pieces_of(moves: Sequence[Move]) -> list[int]:
    """Where in a step each micro-batch begins: at the loading that goes before a forward pass."""
    entries = [(place, move.phase) for place, move in enumerate(moves) if isinstance(move, Entry)]
    return [before[0] for before, after in pairwise(entries) if (before[1], after[1]) == ("load", "forward")]


def _widened(moves: Sequence[Move], living: Counter[Birth], micro_batches: int) -> list[Move] | None:
    """A step's moves with its second micro-batch repeated, or left out where two are asked for; None when
    that one is not steady."""
    starts = pieces_of(moves)
    if len(starts) == micro_batches:
        return list(moves)
    if len(starts) != MICRO_BATCHES or micro_batches < MICRO_BATCHES - 1:
        return None
    _, second, third = starts
    count(living, moves[:second])
    before = living.copy()
    count(living, moves[second:third])
    if _standing(living) != _standing(before):
        return None
    middle = list(moves[second:third]) * (micro_batches - MICRO_BATCHES + 1)
    return [*moves[:second], *middle, *moves[third:]]
