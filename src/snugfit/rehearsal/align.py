"""Two scores laid side by side: where the longer one has more.

The longer score comes from a model with more layers. At each place where it has moves that the shorter one
lacks, they must repeat what stands before them, for a layer comes after layers like it. Everything else must
agree, move by move, apart from what may change with the number of layers; a sketch leaves that open.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from snugfit.rehearsal.score import NUMBER, Birth, Death, Move, Run, folded

AHEAD = 24
"""Moves behind an insertion that are looked at to believe it."""

WORK = ("flops", "nbytes", "tensors")
"""The fields of a kernel that may change from layer to layer, beside its shapes."""


class Sketch(NamedTuple):
    """A move, with what may change from layer to layer taken apart."""

    shape: Any
    """What must be equal wherever the move stands: the move with its numbers left open."""
    sizes: tuple[int, ...] = ()
    """Bytes of the block that is born or dies; dimensions of a kernel's inputs, one after the other."""
    work: tuple[int, ...] = ()
    """A kernel's FLOPs and bytes."""
    numbers: tuple[int, ...] = ()
    """The layers' numbers in the module's name."""
    younger: int = 0
    """Of a death: how many of the living that are alike are younger."""
    older: int = 0
    """And how many are older."""


class Insertion(NamedTuple):
    """Moves that a longer score has more."""

    before: int
    """The move of the shorter score that they stand before."""
    length: int


def sketched(moves: Sequence[Move]) -> Iterator[Sketch]:
    """The moves' sketches."""
    living = Counter[Birth]()
    for move in moves:
        match move:
            case Birth():
                living[move.alike] += bool(move.nbytes)
                born = move._replace(nbytes=0, module=folded(move.module))
                yield Sketch(born, (move.nbytes,), (), _numbers(move.module))
            case Death(alike, younger):
                living[alike] -= 1
                dead = Death(alike._replace(nbytes=0), 0)
                yield Sketch(dead, (alike.nbytes,), (), (), younger, living[alike] - younger)
            case Run(kernel):
                ranks = tuple((0,) * len(each) for each in kernel.shapes)
                none: dict[str, Any] = dict.fromkeys(WORK, 0)
                run = kernel._replace(module=folded(kernel.module), shapes=ranks, **none)
                sizes = tuple(size for each in kernel.shapes for size in each)
                work = tuple(getattr(kernel, field) for field in WORK)
                yield Sketch(Run(run), sizes, work, _numbers(kernel.module))
            case _:
                yield Sketch(move)


def _numbers(module: str) -> tuple[int, ...]:
    return tuple(int(number) for number in NUMBER.findall(module))


def insertions(short: Sequence[Sketch], long: Sequence[Sketch]) -> list[Insertion] | None:
    """Where the longer score has moves that repeat those before them; None when it differs otherwise."""
    first, second = _comparable(short, long)
    found: list[Insertion] = []
    here, there, floor = 0, 0, 0
    while here < len(first) or there < len(second):
        if here < len(first) and there < len(second) and first[here] == second[there]:
            here, there = here + 1, there + 1
            continue
        length = _repetition(first, here, second, there)
        if length:
            found.append(_in_the_middle(second, there, here, length, floor))
            there = floor = there + length
        else:
            return None
    return found


def _repetition(first: Sequence[int], here: int, second: Sequence[int], there: int) -> int:
    """How many moves of the second, from `there`, repeat those before them, so that the scores agree behind
    them for longest; 0 when none do."""
    most = min(len(second) - there - (len(first) - here), there)
    best, agreed = 0, 0
    for length in range(1, most + 1):
        behind = there + length
        if second[there] != second[there - length] or second[behind : behind + 1] != first[here : here + 1]:
            continue
        agree = _agreement(first, here, second, behind)
        if agree > agreed and second[there:behind] == second[there - length : there]:
            best, agreed = length, agree
    return best


def _agreement(first: Sequence[int], here: int, second: Sequence[int], there: int) -> int:
    """For how many moves, up to `AHEAD`, the two go on alike; both ending together is as good as all."""
    for ahead in range(AHEAD):
        ends = (here + ahead >= len(first), there + ahead >= len(second))
        if any(ends):
            return AHEAD if all(ends) else ahead
        if first[here + ahead] != second[there + ahead]:
            return ahead
    return AHEAD


def _in_the_middle(second: Sequence[Any], there: int, here: int, length: int, floor: int) -> Insertion:
    """The insertion as far from the ends of its stretch of repetitions as it goes: the first layers and the
    last may differ from the others in what they kill, though not in what they are called."""
    back = 0
    while back < there - floor and second[there - back - 1] == second[there - back - 1 + length]:
        back += 1
    return Insertion(here - back // 2, length)


def _comparable(short: Sequence[Sketch], long: Sequence[Sketch]) -> tuple[list[int], list[int]]:
    """Both scores' moves as numbers that are equal where moves are. Sizes count, but for blocks that have one
    size here and another there: those grow with the number of layers."""
    sizes: list[dict[Any, set[Any]]] = [defaultdict(set), defaultdict(set)]
    for seen, sketch in zip(sizes, (short, long), strict=True):
        for move in sketch:
            seen[move.shape].add(move.sizes)
    growing = {shape for shape, seen in sizes[0].items() if seen.isdisjoint(sizes[1].get(shape, seen))}
    numbers: dict[Any, int] = {}  # small numbers compare faster than moves
    first, second = (
        [
            numbers.setdefault((move.shape, move.shape not in growing and move.sizes), len(numbers))
            for move in sketch
        ]
        for sketch in (short, long)
    )
    return first, second
