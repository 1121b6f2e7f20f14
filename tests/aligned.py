"""Compare two accounts of one step, event by event: the events of a real allocator and those of a trace.

Births are aligned by their sizes, in order. A death belongs to a certain birth. So two accounts are equal
only when the same block is freed at the same place. A block of the same size is not enough.

Consecutive deaths with no birth between them have no order here. An allocator that has freed them all is in
the same state in any order. Autocast's cache, a hash map by address, is emptied in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher


@dataclass(frozen=True)
class Event:
    """A birth (`nbytes` above 0) or a death (below) of one block."""

    block: int
    """Number shared by a birth and its death."""
    nbytes: int
    operators: tuple[str, ...] = field(default=(), compare=False)
    """Operators around the event, outermost first; a death has those of its birth."""
    inside: frozenset[str] = field(default=frozenset(), compare=False)
    """Operators within one call of which the block is born and freed."""
    step: int = field(default=0, compare=False)
    phase: str = field(default="", compare=False)


@dataclass(frozen=True)
class Comparison:
    """The similarity of two accounts."""

    similarity: float
    """Share of events in common, in order (`difflib`): 1.0 means equal accounts."""
    lines: tuple[str, ...]
    """Events of only one account: `real` or `trace`, birth or death, bytes, operator."""

    def __str__(self) -> str:
        return f"{self.similarity:.5f} alike; " + ("\n  ".join(("differences:", *self.lines[:40])))


BEFORE = -1
"""Placeholder for a block that was born before the step: only its size is compared."""


def compare(real: Sequence[Event], trace: Sequence[Event]) -> Comparison:
    """Align the two accounts and compare them. Equal accounts skip the slow search for common parts."""
    births = [[event for event in account if event.nbytes > 0] for account in (real, trace)]
    sizes = [[birth.nbytes for birth in account] for account in births]
    whole = [(0, 0, len(sizes[0]))]
    partner = {
        births[1][start + offset].block: births[0][other + offset].block
        for other, start, length in (
            whole if sizes[0] == sizes[1] else _matcher(*sizes).get_matching_blocks()
        )
        for offset in range(length)
    }
    born = {event.block for event in births[0]}
    left = list(_in_order(real, lambda block: block if block in born else BEFORE))
    own = {event.block for event in births[1]}
    right = list(_in_order(trace, lambda block: partner.get(block, -2 - block) if block in own else BEFORE))
    keys = [[key for key, _ in account] for account in (left, right)]
    if keys[0] == keys[1]:
        return Comparison(1.0, ())
    matcher, lines = _matcher(*keys), []
    for tag, start, end, other, until in matcher.get_opcodes():
        if tag != "equal":
            lines += [_line("real", event) for _, event in left[start:end]]
            lines += [_line("trace", event) for _, event in right[other:until]]
    return Comparison(matcher.ratio(), tuple(lines))


def _matcher(left: Sequence[object], right: Sequence[object]) -> SequenceMatcher[object]:
    return SequenceMatcher(None, left, right, autojunk=False)


def _in_order(
    account: Sequence[Event], name: Callable[[int], int]
) -> Iterator[tuple[tuple[int, int], Event]]:
    """Yield events with their comparison keys; consecutive deaths are sorted."""
    deaths: list[tuple[tuple[int, int], Event]] = []
    for event in account:
        key = (name(event.block), event.nbytes)
        if event.nbytes < 0:
            deaths.append((key, event))
            continue
        yield from sorted(deaths, key=lambda one: one[0])
        deaths.clear()
        yield key, event
    yield from sorted(deaths, key=lambda one: one[0])


def _line(whose: str, event: Event) -> str:
    what = "birth" if event.nbytes > 0 else "death"
    return f"{whose} {what} {abs(event.nbytes)} {'/'.join(event.operators[-4:])}"


def peak(account: Sequence[Event]) -> int:
    """Return the largest number of bytes that are allocated at once."""
    most = current = 0
    for event in account:
        current += event.nbytes
        most = max(most, current)
    return most
