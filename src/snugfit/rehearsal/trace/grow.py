"""A sequence that grows with a model's depth, written out for any depth from two shallow models.

What a model of few layers does stands in a list: its moves, the sizes of its buffers. A model with one period
of layers more has the same list with something inserted, at one place for each stack of layers that the list
runs through. Where what is inserted repeats what stands before it, a deeper model has it so often more.

Entries have numbers beside what they are: a layer's own, or how many younger blocks there are. In a list that
repeats these grow by the same with each layer and with each copy, so two depths and two copies tell them all.
Where the lists do not differ in this way, the answer is None.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import count
from typing import NamedTuple


class Entry(NamedTuple):
    """One entry of such a list."""

    key: Hashable
    """What it is, at any depth and in any layer."""
    numbers: tuple[int, ...] = ()
    """What differs between layers and depths."""


class Grown(NamedTuple):
    """An entry of the deep model's list."""

    like: int
    """Which entry of the deeper of the two lists it is like."""
    numbers: tuple[int, ...]
    repeats: bool = False
    """Whether it is one of those that are inserted."""


class _Insertion(NamedTuple):
    """Where the deeper list has more."""

    shallow: int
    """Entries of the shallow list before it."""
    deeper: int
    """Entries of the deeper list before it."""
    length: int


def grow(shallow: Sequence[Entry], deeper: Sequence[Entry], periods: int) -> list[Grown] | None:
    """The list of a model with so many `periods` of layers more than the deeper one has, which has one period
    more than the shallow one; None where what is inserted does not repeat what stands before it."""
    numbers = count()
    known: dict[Hashable, int] = {}
    left, right = (
        [known[key] if key in known else known.setdefault(key, next(numbers)) for key, _ in entries]
        for entries in (shallow, deeper)
    )
    insertions = _insertions(left, right)
    if insertions is None:
        return None
    grown: list[Grown] = []
    at, behind = 0, 0  # how far into the deeper list, and how many fewer entries the shallow one has there
    for ahead, end, length in [*insertions, _Insertion(len(left), len(right), 0)]:
        for index in range(at, end):
            few, more = shallow[index - behind].numbers, deeper[index].numbers
            grown.append(Grown(index, tuple(m + (m - f) * periods for f, m in zip(few, more, strict=True))))
        for index in [*range(end, end + length)] * (periods + 1 if length else 0):
            step = zip(deeper[index].numbers, deeper[index - length].numbers, strict=True)
            before = grown[-length].numbers
            moved = tuple(b + now - then for b, (now, then) in zip(before, step, strict=True))
            grown.append(Grown(index, moved, repeats=True))
        at, behind = end + length, end + length - ahead
    return grown


def _insertions(left: Sequence[int], right: Sequence[int]) -> list[_Insertion] | None:
    """Where `right` has more than `left`: as often as what is there repeats what stands before it."""
    insertions: list[_Insertion] = []
    at, start = 0, 0  # of `right`, and where the last insertion ends
    behind = 0
    while True:
        at += _common(left, at - behind, right, at)
        more = len(right) - len(left) - behind
        if more == 0:
            return insertions if at == len(right) else None
        length = _length_at(left, at - behind, right, at, more)
        if not length:
            return None
        index = _middle(right, start, at, length)
        insertions.append(_Insertion(index - behind, index, length))
        behind += length
        at += length
        start = index + length


def _length_at(left: Sequence[int], start: int, right: Sequence[int], at: int, most: int) -> int:
    """How many entries of `right` are inserted here: those that repeat the ones before and behind which the
    lists agree the longest. 0 where none do."""
    best = longest = 0
    for length in range(1, min(most, at) + 1):
        if right[at] == right[at - length] and right[at - length : at] == right[at : at + length]:
            agree = _common(left, start, right, at + length)
            if agree > longest or (agree == 0 and start == len(left) and not best):
                best, longest = length, agree
    return best


def _middle(right: Sequence[int], start: int, at: int, length: int) -> int:
    """The place in the middle of those at which this insertion may as well be: what stands at the ends of
    what repeats may look alike, and have other numbers."""
    earliest = at
    while earliest - length > start and right[earliest - length - 1] == right[earliest - 1]:
        earliest -= 1
    return at - (at - earliest) // 2


def _common(left: Sequence[int], at: int, right: Sequence[int], other: int) -> int:
    """How many entries are the same from here on."""
    most = min(len(left) - at, len(right) - other)
    for number in range(most):
        if left[at + number] != right[other + number]:
            return number
    return most
