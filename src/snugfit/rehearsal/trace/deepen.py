"""Moves of a deep model, from those of two shallow ones that differ by one period of layers (law 5).

Each phase of a run is grown by itself (`grow.py`). A move is what it is but for the numbers of layers in its
module's name, and, of a free, but for how many younger and older blocks are on the stack. A few buffers have an entry
for each layer, such as the seeds of all dropouts of a compiled model: a size that only one of the two models
has, and the work of a kernel that reads it, count as numbers too.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from snugfit.rehearsal.trace.grow import Entry, Grown, grow
from snugfit.rehearsal.trace.relative import (
    NUMBER,
    Alloc,
    Free,
    Move,
    PhaseStart,
    RelativeTrace,
    without_layer_numbers,
)
from snugfit.rehearsal.trace.trace import Kernel, MarkKind
from snugfit.results.footprint import Kind


def deepen(shallow: RelativeTrace, deeper: RelativeTrace, periods: int) -> RelativeTrace | None:
    """The trace of a model with so many `periods` of layers more than the deeper one of these, which has one
    more than the shallow one; None where they do not differ by a period."""
    few, more = _by_phase(shallow), _by_phase(deeper)
    if len(few) != len(more) or shallow.attention != deeper.attention:
        return None
    grows = {_kind(move) for move in shallow.moves} ^ {_kind(move) for move in deeper.moves}
    written = _Written(grows)
    for before, after in zip(few, more, strict=True):
        grown = grow(_entries(before, grows), _entries(after, grows), periods)
        if grown is None or not all(written.add(after[one.like], one) for one in grown):
            return None
    return replace(deeper, moves=tuple(written.moves))


def numbers_of(name: str) -> tuple[int, ...]:
    """The layers' numbers in a dotted name."""
    return tuple(map(int, NUMBER.findall(name)))


class _Placed(NamedTuple):
    """A free, and how many blocks of its stack are older than the one that it frees."""

    free: Free
    older: int


_Step = Alloc | _Placed | PhaseStart | Kernel | MarkKind


def _by_phase(trace: RelativeTrace) -> list[Sequence[_Step]]:
    """The moves, cut where phases begin. Which of several blocks that are freed at once goes first does
    not matter, and follows from their names in a compiled program (`buf9`, `buf10`): they are sorted, but
    for gradients, by whose order passes and update are joined."""
    live: Counter[Alloc] = Counter()
    parts: list[list[_Step]] = [[]]
    for sorts, moves in itertools.groupby(trace.moves, _may_be_sorted):
        for move in _sorted_frees([*moves]) if sorts else moves:
            if type(move) is PhaseStart:
                parts.append([])
            if type(move) is Alloc:
                live[move.stack] += 1
            if type(move) is Free:
                live[move.stack] -= 1
                parts[-1].append(_Placed(move, live[move.stack] - move.stack_distance))
            else:
                parts[-1].append(move)
    return parts


def _may_be_sorted(move: Move) -> bool:
    return type(move) is Free and move.stack.kind != Kind.GRADIENTS


def _sorted_frees(frees: Sequence[Any]) -> list[Free]:
    """These frees, which come one after the other, by stack, and on each the oldest block first."""
    places: dict[Alloc, list[int]] = defaultdict(list)  # counted from the top before any is freed
    for stack, distance in frees:
        for other in sorted(places[stack]):
            distance += other <= distance
        places[stack].append(distance)
    by_name = sorted(places.items(), key=lambda item: (item[0][1:], item[0][0]))
    return [Free(stack, distance) for stack, found in by_name for distance in sorted(found, reverse=True)]


def _kind(move: Move | _Placed) -> Hashable:
    """What a move is in any layer: of an allocation and a free the stack, so that they go together."""
    if type(move) is _Placed:
        return move.free.stack
    if isinstance(move, (Alloc, Free)):
        return move.stack
    return move._replace(module=without_layer_numbers(move.module)) if type(move) is Kernel else move


def _entries(moves: Sequence[_Step], grows: set[Hashable]) -> list[Entry]:
    """These moves; `grows` are the kinds of which the sizes are numbers."""
    return [_entry(move, _kind(move) in grows) for move in moves]


def _entry(move: _Step, grows: bool) -> Entry:
    if type(move) is _Placed:
        (stack, younger), older = move
        size = (stack.nbytes,) if grows else ()
        return Entry(("free", _sizeless(stack) if grows else stack), (younger, older, *size))
    if isinstance(move, (Alloc, Kernel)):
        plain: Any = move._replace(module=without_layer_numbers(move.module))
        sizes = _sizes(move) if grows else ()
        return Entry((type(move), _sizeless(plain) if grows else plain), (*numbers_of(move.module), *sizes))
    return Entry(move)


def _sizes(move: Alloc | Kernel) -> tuple[int, ...]:
    if type(move) is Kernel:
        return move.nbytes, move.flops, *(size for shape in move.shapes for size in shape)
    return (move.nbytes,)


def _sizeless(move: Any) -> Any:
    if type(move) is Kernel:
        return move._replace(nbytes=0, flops=0, shapes=tuple((0,) * len(shape) for shape in move.shapes))
    return move._replace(nbytes=0)


class _Written:
    """The deep model's moves, as far as they are written; `grows` are the kinds of which sizes are numbers."""

    def __init__(self, grows: set[Hashable]) -> None:
        self.moves: list[Move] = []
        self._grows = grows
        self._live: Counter[Alloc] = Counter()

    def add(self, like: _Step, grown: Grown) -> bool:
        """Writes a move that is like this one and has its own numbers; False where there is none such."""
        if type(like) is _Placed:
            return self._free(like, grown)
        if isinstance(like, (Alloc, Kernel)):
            like = _with_numbers(like, iter(grown.numbers), sized=_kind(like) in self._grows)
        if type(like) is Alloc:
            self._live[like.stack] += 1
        self.moves.append(like)
        return True

    def _free(self, like: _Placed, grown: Grown) -> bool:
        """Blocks are counted from the end of their stack from which they have the same place at any depth.
        Of a stack that never grows, which block goes may be chance in the shallow model: of a program's
        buffers each takes the place of one that was dropped last."""
        younger, older, *size = grown.numbers
        stack = like.free.stack._replace(nbytes=size[0]) if size else like.free.stack
        there = self._live[stack] - 1
        if younger != like.free.stack_distance:
            if older == like.older:
                younger = there - older
            elif like.free.stack_distance + like.older == there and not grown.repeats:
                younger = like.free.stack_distance
            elif younger + older != there:
                return False
        if not 0 <= younger <= there:
            return False
        self._live[stack] = there
        self.moves.append(Free(stack, younger))
        return True


def _with_numbers(move: Alloc | Kernel, ahead: Iterator[int], *, sized: bool) -> Alloc | Kernel:
    move = move._replace(module=NUMBER.sub(lambda match: str(next(ahead)), move.module))
    if not sized:
        return move
    if type(move) is Kernel:
        nbytes, flops = next(ahead), next(ahead)
        shapes = tuple(tuple(next(ahead) for _ in shape) for shape in move.shapes)
        return move._replace(nbytes=nbytes, flops=flops, shapes=shapes)
    return move._replace(nbytes=next(ahead))
