"""What the blocks of a piece of a tape come to: how high they rise, and which large ones come and go.

The caching allocator keeps large blocks apart from small ones, so what it does with them follows from their
births and deaths alone. Those are written here without names and layers: two pieces that have the same are
the same to its large pool.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from snugfit.rehearsal.score import Birth, Death, Move, folded

if TYPE_CHECKING:
    from snugfit.rehearsal.tape import Tape

LARGE = 1 << 20
"""Blocks above this are large."""


def levels(tape: Tape, live: Sequence[int], start: int, end: int) -> dict[str, int]:
    """Most live bytes at the births between these events, by phase and module."""
    found: dict[str, int] = defaultdict(int)
    for place in range(start, end):
        if (event := tape.events[place]) > 0:
            block = tape.blocks[event - 1]
            where = f"{block.phase} {folded(block.module)}"
            found[where] = max(found[where], live[place])
    return dict(found)


def large_blocks(tape: Tape, start: int, end: int) -> Iterator[int]:
    """The births and deaths of large blocks between these events: the bytes of each that is born, and below 0
    how many were born since each that dies."""
    order: dict[int, int] = {}
    for place in range(end):
        event = tape.events[place]
        if event > 0 and tape.blocks[event - 1].nbytes > LARGE:
            order[event] = len(order)
            if place >= start:
                yield tape.blocks[event - 1].nbytes
        elif place >= start and -event in order:
            yield order[-event] - len(order)


def large_moves(moves: Sequence[Move]) -> Iterator[tuple[int, int]]:
    """The births and deaths of large blocks in a score: bytes, and of each that dies its place among those
    born alike."""
    for move in moves:
        if isinstance(move, Birth) and move.nbytes > LARGE:
            yield move.nbytes, -1
        elif isinstance(move, Death) and move.alike.nbytes > LARGE:
            yield move.alike.nbytes, move.younger
