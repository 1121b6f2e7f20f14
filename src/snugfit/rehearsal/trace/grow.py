"""Extrapolation of a sequence, such as a model's kernels, to more layers, from those of two models with few
layers.

The sequence describes a model of few layers, such as the events of its trace. A model with one more period
(repeating group of layers) has the same sequence with insertions, one per stack of layers. If an insertion
equals the entries before it, a deeper model repeats it once per further period.

An entry has a key and numbers, such as layer numbers. In a repeating sequence, the numbers grow linearly with
each layer and each copy. So two models and two copies determine them. The result is None if the sequences do
not differ in this way.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import count
from typing import NamedTuple


class Entry(NamedTuple):
    """One element of a sequence that describes a model, such as an event of its trace. It has a key, and
    numbers that grow with the layer.
    """

    key: Hashable
    """Key that corresponding entries share at any depth and in any layer."""
    numbers: tuple[int, ...] = ()
    """Numbers of the entry that differ between layers or depths."""


class GrownElement(NamedTuple):
    """An element of the full model's sequence: a copy of one of a small model's, with extrapolated
    numbers.
    """

    like: int
    """Index of the corresponding entry in the sequence of the deeper small model."""
    numbers: tuple[int, ...]
    repeats: bool = False
    """True if this part of the trace repeats with each further layer."""


class _Insertion(NamedTuple):
    """Entries that a model with one more repetition of layers has at one position of a sequence, such as its
    kernels.
    """

    shallow: int
    """Number of entries of the shallow model's sequence before the insertion."""
    deeper: int
    """Number of entries of the deeper model's sequence before the insertion."""
    length: int


def grow(shallow: Sequence[Entry], deeper: Sequence[Entry], periods: int) -> list[GrownElement] | None:
    """Extrapolate the sequences of two small models to a model with `periods` more repetitions of the layers.
    Return its sequence or None.

    The deeper model has one period more than the shallow one. Return None if an insertion does not repeat the
    entries before it.
    """
    # Small numbers compare faster than keys, and each entry is compared many times.
    numbers = count()
    known: dict[Hashable, int] = {}
    left, right = (
        [known[key] if key in known else known.setdefault(key, next(numbers)) for key, _ in entries]
        for entries in (shallow, deeper)
    )
    insertions = _insertions(left, right)
    if insertions is None:
        return None
    grown: list[GrownElement] = []
    at, behind = 0, 0  # index in the deeper list, and number of entries that the shallow one lacks before it
    for ahead, end, length in [*insertions, _Insertion(len(left), len(right), 0)]:
        for index in range(at, end):
            few, more = shallow[index - behind].numbers, deeper[index].numbers
            # Numbers are linear in the depth, so two depths determine them.
            grown.append(
                GrownElement(index, tuple(m + (m - f) * periods for f, m in zip(few, more, strict=True)))
            )
        for index in [*range(end, end + length)] * (periods + 1 if length else 0):
            # Within an insertion, each copy continues the numbers by the difference of the last two copies.
            step = zip(deeper[index].numbers, deeper[index - length].numbers, strict=True)
            before = grown[-length].numbers
            moved = tuple(b + now - then for b, (now, then) in zip(before, step, strict=True))
            grown.append(GrownElement(index, moved, repeats=True))
        at, behind = end + length, end + length - ahead
    return grown


def _insertions(left: Sequence[int], right: Sequence[int]) -> list[_Insertion] | None:
    """Return the repeated entries to insert into `left` to make `right`; None if insertions are not
    enough.
    """
    insertions: list[_Insertion] = []
    at, start = 0, 0  # index in `right`, and the end of the last insertion
    behind = 0
    while True:
        at += _common(left, at - behind, right, at)
        # These entries of `right` still have no counterpart, and no insertion can be longer.
        more = len(right) - len(left) - behind
        if more == 0:
            return insertions if at == len(right) else None
        length = _length_at(left, at - behind, right, at, more)
        if not length:
            # The sequences differ by more than repeated entries.
            return None
        index = _middle(right, start, at, length)
        insertions.append(_Insertion(index - behind, index, length))
        behind += length
        at += length
        start = index + length


def _length_at(left: Sequence[int], start: int, right: Sequence[int], at: int, most: int) -> int:
    """Return the number of entries of `right` that are inserted at this position, or 0.

    They repeat the entries before them. If several lengths are possible, it is the one after which the most
    entries match.
    """
    best = longest = 0
    for length in range(1, min(most, at) + 1):
        # The inserted entries equal both the entries before them and those after.
        if right[at] == right[at - length] and right[at - length : at] == right[at : at + length]:
            agree = _common(left, start, right, at + length)
            # At the end of the shallow sequence, no length matches further, and the shortest one is chosen.
            if agree > longest or (agree == 0 and start == len(left) and not best):
                best, longest = length, agree
    return best


def _middle(right: Sequence[int], start: int, at: int, length: int) -> int:
    """Return the middle of the possible positions of repeated entries in a sequence.

    Entries at the ends of the repetition may have equal keys but different numbers.
    """
    earliest = at
    # A repetition may be shifted as long as the entries at both ends are equal.
    while earliest - length > start and right[earliest - length - 1] == right[earliest - 1]:
        earliest -= 1
    return at - (at - earliest) // 2


def _common(left: Sequence[int], at: int, right: Sequence[int], other: int) -> int:
    """Return the number of consecutive equal entries in two sequences, from these two positions on."""
    most = min(len(left) - at, len(right) - other)
    for number in range(most):
        if left[at + number] != right[other + number]:
            return number
    return most
