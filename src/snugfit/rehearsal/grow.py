"""A score lengthened: from the scores of few layers, the score of many.

Three scores of one job are given, each with one *period* of layers more than the one before (a period is one
layer, or as many as the kinds of layers take to come round). What a period adds is read off the first two:
laid side by side, the longer one has more moves at some places, and at each they repeat what stands there
already, for a layer comes after layers like it. One period more adds the same moves at each place once more.

What may change from layer to layer is taken as a straight line, in the number of periods added and in the
number of the copy: the numbers in a module's name, the size of what holds an entry for each parameter (the
norms that clipping stacks), the work of kernels over lists of tensors. Which of the living dies is counted
from the youngest or from the oldest, whichever stays put.

The third score is the proof: every line goes through it, and `grown(..., 2)` is it, move by move. A step that
is not like this gives None, and the caller rehearses it whole.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from snugfit.rehearsal.align import WORK, Insertion, Sketch, insertions, sketched
from snugfit.rehearsal.score import Birth, Death, Move, Run, Score


class Slot(NamedTuple):
    """Where a move of a grown score comes from."""

    place: int
    """Which insertion, or -1 for what the shortest score has."""
    move: int
    """The move's number in the insertion, or in the shortest score."""
    copy: int = 0
    """Which copy of the insertion."""


class Line(NamedTuple):
    """A number that grows evenly."""

    start: int
    by_copy: int
    by_period: int

    def at(self, copy: int, periods: int) -> int:
        """Its value in this copy, with so many periods added."""
        return self.start + copy * self.by_copy + periods * self.by_period


class Irregular(Exception):
    """A number that does not grow evenly."""


def grown(scores: Sequence[Score], periods: int) -> Score | None:
    """The score with `periods` periods more than the first of these three, each of which has one more than
    the one before it; None when they are not that regular."""
    if len({(score.attention, score.doubts) for score in scores}) != 1:
        return None
    sketches = [list(sketched(score.moves)) for score in scores]
    places = insertions(sketches[0], sketches[1])
    if places is None:
        return None
    seen: dict[tuple[int, int], list[Sketch]] = defaultdict(list)
    for count, sketch in enumerate(sketches):
        slots = list(_slots(len(sketches[0]), places, count))
        if len(slots) != len(sketch):
            return None
        for slot, move in zip(slots, sketch, strict=True):
            seen[slot[:2]].append(move)
    try:
        laws = {key: _Law(moves, inserted=key[0] >= 0) for key, moves in seen.items()}
        slots = list(_slots(len(sketches[0]), places, periods))
        return replace(scores[0], moves=tuple(_written(laws, slots, periods)))
    except Irregular:
        return None


def _named(module: str, numbers: Sequence[int]) -> str:
    remaining = iter(numbers)
    return ".".join(str(next(remaining)) if part == "*" else part for part in module.split("."))


def _slots(moves: int, places: Sequence[Insertion], periods: int) -> Iterator[Slot]:
    start = 0
    for place, insertion in enumerate(places):
        yield from (Slot(-1, index) for index in range(start, insertion.before))
        for copy in range(periods):
            yield from (Slot(place, index, copy) for index in range(insertion.length))
        start = insertion.before
    yield from (Slot(-1, index) for index in range(start, moves))


class _Law:
    """One move of the grown score, whatever its copy and the number of periods."""

    shape: Any

    def __init__(self, seen: Sequence[Sketch], *, inserted: bool) -> None:
        if len({(move.shape, len(move.sizes), len(move.numbers)) for move in seen}) != 1:
            raise Irregular
        fit = _counted if inserted else _through_periods
        self.shape = shape = seen[0].shape
        self.module = getattr(shape.kernel if isinstance(shape, Run) else shape, "module", "")
        self.sizes, self.work = fit([move.sizes for move in seen]), fit([move.work for move in seen])
        self.numbers = (_through_copies if inserted else _through_periods)([move.numbers for move in seen])
        self.rank, self.from_oldest = _rank(seen, fit)

    def write(self, copy: int, periods: int, living: Counter[Birth]) -> Move:
        """The move itself; counts the living."""
        sizes = [line.at(copy, periods) for line in self.sizes]
        module = _named(self.module, [line.at(copy, periods) for line in self.numbers])
        match self.shape:
            case Birth():
                birth = self.shape._replace(nbytes=sizes[0], module=module)
                living[birth.alike] += bool(birth.nbytes)
                return birth
            case Death():
                alike = self.shape.alike._replace(nbytes=sizes[0])
                living[alike] -= 1
                rank = self.rank.at(copy, periods)
                return Death(alike, living[alike] - rank if self.from_oldest else rank)
            case Run(kernel):
                flat = iter(sizes)
                shapes = tuple(tuple(next(flat) for _ in each) for each in kernel.shapes)
                work: dict[str, Any] = dict(
                    zip(WORK, (line.at(copy, periods) for line in self.work), strict=True)
                )
                return Run(kernel._replace(module=module, shapes=shapes, **work))
            case _:
                other: Move = self.shape
                return other


def _rank(seen: Sequence[Sketch], fit: Callable[..., list[Line]]) -> tuple[Line, bool]:
    """Which of the living dies, counted from the end that stays put, else from the one that moves evenly;
    and whether that is the oldest's end."""
    younger, older = [move.younger for move in seen], [move.older for move in seen]
    ends = sorted(((younger, False), (older, True)), key=lambda end: len(set(end[0])) > 1)
    for ranks, from_oldest in ends:
        with contextlib.suppress(Irregular):
            return fit([(rank,) for rank in ranks])[0], from_oldest
    raise Irregular


def _through_periods(seen: Sequence[tuple[int, ...]]) -> list[Line]:
    """The lines through the numbers of one move in three scores."""
    lines = [Line(first, 0, second - first) for first, second, _ in zip(*seen, strict=True)]
    if [line.at(0, 2) for line in lines] != list(seen[2]):
        raise Irregular
    return lines


def _through_copies(seen: Sequence[tuple[int, ...]]) -> list[Line]:
    """The lines through the numbers of an inserted move: once in the second score, twice in the third."""
    return [
        Line(alone - (first - alone), second - first, first - alone)
        for alone, first, second in zip(*seen, strict=True)
    ]


def _counted(seen: Sequence[tuple[int, ...]]) -> list[Line]:
    """The same for what decides bytes: it must count the copies, from the first or from the last, so that
    the three points are one more than such a line needs."""
    lines = _through_copies(seen)
    if any(line.by_period and line.by_copy != -line.by_period for line in lines):
        raise Irregular
    return lines


def _written(laws: dict[tuple[int, int], _Law], slots: Sequence[Slot], periods: int) -> Iterator[Move]:
    living = Counter[Birth]()
    for slot in slots:
        yield laws[slot[:2]].write(slot.copy, periods, living)
