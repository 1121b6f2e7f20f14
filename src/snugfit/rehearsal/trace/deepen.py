"""Moves of a deep model, from those of two shallow ones that differ by one period of layers (law 5).

Each phase of a run is grown by itself (`grow.py`). A move is what it is but for the numbers of layers in its
module's name, and, of a free, but for how many younger and older blocks of its kind there are. A few buffers
have an entry for each layer, such as the seeds of all dropouts of a compiled model: a size that only one of
the two models has, and the work of a kernel that reads it, count as numbers too.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from snugfit.rehearsal.trace.grow import Entry, Grown, grow
from snugfit.rehearsal.trace.relative import (
    NUMBER,
    Alloc,
    Free,
    LiveSet,
    Move,
    PhaseStart,
    RelativeTrace,
    without_layer_numbers,
)
from snugfit.rehearsal.trace.trace import Kernel, MarkKind
from snugfit.results.footprint import Kind

PASSES = ("forward", "backward")
"""Phases in which compiled programs run."""


def deepen(
    shallow: RelativeTrace, deeper: RelativeTrace, periods: int, *, compiled: bool = True
) -> RelativeTrace | None:
    """The trace of a model with so many `periods` of layers more than the deeper one of these, which has one
    more than the shallow one; None where they do not differ by a period. In passes that are `compiled` the
    order of frees that follow each other is that of names, and does not matter."""
    passes = PASSES if compiled else ()
    few, more = _by_phase(shallow, passes), _by_phase(deeper, passes)
    if len(few) != len(more) or shallow.attention != deeper.attention:
        return None
    known = [{_kind(move) for part in parts for move in part} for parts in (few, more)]
    written = _Written(known[0] ^ known[1])
    for before, after in zip(few, more, strict=True):
        grown = grow(_entries(before, written.grows), _entries(after, written.grows), periods)
        if grown is None or not all(written.add(after[one.like], one) for one in grown):
            return None
    return replace(deeper, moves=tuple(written.moves()))


def numbers_of(name: str) -> tuple[int, ...]:
    """The layers' numbers in a dotted name."""
    return tuple(map(int, NUMBER.findall(name)))


class _Placed(NamedTuple):
    """A block is freed."""

    pile: Alloc
    younger: int
    """Blocks of its pile that live and are younger."""
    older: int


_Step = Alloc | _Placed | PhaseStart | Kernel | MarkKind


class _Piles:
    """The live blocks: on their stacks, and on piles, on which temporary ones lie together whoever made
    them. In a program one buffer takes the place of another, made elsewhere, before its layers repeat."""

    def __init__(self) -> None:
        self._made = itertools.count()
        self._stacks: dict[Alloc, list[int]] = defaultdict(list)
        self.piles: dict[Alloc, list[int]] = defaultdict(list)
        self._allocs: dict[int, Alloc] = {}

    def alloc(self, alloc: Alloc) -> None:
        """Puts a block on its stack and its pile."""
        number = next(self._made)
        self._allocs[number] = alloc
        self._stacks[alloc.stack].append(number)
        self.piles[_pile_of(alloc)].append(number)

    def blocks_of(self, frees: Sequence[Any], *, by_name: bool) -> list[int]:
        """The blocks that are freed, by these moves that come one after the other. Which of them goes first
        does not matter, and follows from their names in a compiled program (`buf9`, `buf10`): where it is so
        `by_name`, they are in an order that does not."""
        freed = [self._stacks[free[0]].pop(-1 - free[1]) for free in frees]
        if not by_name:
            return freed
        return sorted(freed, key=lambda number: (*_pile_of(self._allocs[number])[1:], number))

    def drop(self, number: int) -> _Placed:
        """Takes a block, which is on no stack any more, from its pile."""
        pile = _pile_of(self._allocs[number])
        blocks = self.piles[pile]
        older = blocks.index(number)
        del blocks[older]
        return _Placed(pile, len(blocks) - older, older)


def _is_open(alloc: Alloc) -> bool:
    """Whether the block is an activation or temporary by when it is freed."""
    return alloc.phase == "forward" and alloc.kind in (Kind.ACTIVATIONS, Kind.TEMPORARIES)


def _pile_of(alloc: Alloc) -> Alloc:
    stack = alloc.stack
    return stack._replace(operator="", kind="") if _is_open(alloc) or not stack.kind else stack


def _by_phase(trace: RelativeTrace, compiled: Collection[str]) -> list[Sequence[_Step]]:
    """The moves, cut where phases begin, of which some are `compiled`."""
    piles, phase = _Piles(), ""
    parts: list[list[_Step]] = [[]]
    for frees, moves in itertools.groupby(trace.moves, lambda move: type(move) is Free):
        if frees:
            parts[-1] += map(piles.drop, piles.blocks_of([*moves], by_name=phase in compiled))
            continue
        for move in moves:
            if type(move) is PhaseStart:
                parts.append([])
                phase = move.phase
            if type(move) is Alloc:
                piles.alloc(move)
            parts[-1].append(move)  # type: ignore[arg-type]
    return parts  # type: ignore[return-value]


def _kind(move: _Step) -> Hashable:
    """What a move is in any layer: of an allocation and a free the pile, so that they go together."""
    if isinstance(move, (Alloc, _Placed)):
        return _pile_of(move) if type(move) is Alloc else move[0]
    return move._replace(module=without_layer_numbers(move.module)) if type(move) is Kernel else move


def _entries(moves: Sequence[_Step], grows: set[Hashable]) -> list[Entry]:
    """These moves; `grows` are the kinds of which the sizes are numbers."""
    return [_entry(move, _kind(move) in grows) for move in moves]


def _entry(move: _Step, grows: bool) -> Entry:
    if type(move) is _Placed:
        pile, younger, older = move
        size = (pile.nbytes,) if grows else ()
        return Entry(("free", _sizeless(pile) if grows else pile), (younger, older, *size))
    if isinstance(move, (Alloc, Kernel)):
        plain: Any = move._replace(module=without_layer_numbers(move.module))
        if type(move) is Alloc and _is_open(move):
            plain = plain._replace(kind="")
        sizes = _sizes(move) if grows else ()
        return Entry((type(move), _sizeless(plain) if grows else plain), (*numbers_of(move.module), *sizes))
    return Entry(move)


def _sizes(move: Alloc | Kernel) -> tuple[int, ...]:
    if type(move) is Kernel:
        return move.nbytes, move.flops, move.tensors, *(size for shape in move.shapes for size in shape)
    return (move.nbytes,)


def _sizeless(move: Any) -> Any:
    if type(move) is Kernel:
        shapes = tuple((0,) * len(shape) for shape in move.shapes)
        return move._replace(nbytes=0, flops=0, tensors=0, shapes=shapes)
    return move._replace(nbytes=0)


class _Written:
    """The deep model's moves, as far as written; `grows` are the kinds of which sizes are numbers."""

    def __init__(self, grows: set[Hashable]) -> None:
        self.grows = grows
        self._written: list[int | Move] = []
        """Blocks that are freed by their numbers."""
        self._allocs: list[int] = []
        """Where in it each block is allocated."""
        self._piles: dict[Alloc, list[int]] = defaultdict(list)
        self._made_forward: set[int] = set()
        """Blocks that the forward pass made which runs."""

    def add(self, like: _Step, grown: Grown) -> bool:
        """Writes a move that is like this one and has its own numbers; False where there is none such."""
        if type(like) is _Placed:
            return self._free(like, grown)
        if isinstance(like, (Alloc, Kernel)):
            like = _with_numbers(like, iter(grown.numbers), sized=_kind(like) in self.grows)
        if type(like) is PhaseStart:
            for number in self._made_forward:
                self._is(number, Kind.ACTIVATIONS)
            self._made_forward.clear()
        if type(like) is Alloc:
            number = len(self._allocs)
            self._allocs.append(len(self._written))
            self._piles[_pile_of(like)].append(number)
            if _is_open(like):
                self._made_forward.add(number)
        self._written.append(like)  # type: ignore[arg-type]
        return True

    def _is(self, number: int, kind: Kind) -> None:
        alloc: Any = self._written[self._allocs[number]]
        self._written[self._allocs[number]] = alloc._replace(kind=kind)

    def _free(self, like: _Placed, grown: Grown) -> bool:
        """Blocks are counted from the end of their pile from which they have the same place at any depth.
        Of a pile that never grows, which block goes may be chance in the shallow model: of a program's
        buffers each takes the place of one that was dropped last."""
        younger, older, *size = grown.numbers
        blocks = self._piles[like.pile._replace(nbytes=size[0]) if size else like.pile]
        last = len(blocks) - 1
        if younger != like.younger:
            if older == like.older:
                younger = last - older
            elif like.younger + like.older == last and not grown.repeats:
                younger = like.younger
            elif younger + older != last:
                return False
        if not 0 <= younger <= last:
            return False
        number = blocks.pop(-1 - younger)
        if number in self._made_forward:
            self._made_forward.remove(number)
            self._is(number, Kind.TEMPORARIES)
        self._written.append(number)
        return True

    def moves(self) -> Iterator[Move]:
        """All that was written, each free by the place of its block."""
        live = LiveSet()
        for move in self._written:
            if isinstance(move, int):
                yield live.free_of(move)
                continue
            if type(move) is Alloc:
                live.alloc(move)
            yield move


def _with_numbers(move: Alloc | Kernel, ahead: Iterator[int], *, sized: bool) -> Alloc | Kernel:
    move = move._replace(module=NUMBER.sub(lambda match: str(next(ahead)), move.module))
    if not sized:
        return move
    if type(move) is Kernel:
        nbytes, flops, tensors = next(ahead), next(ahead), next(ahead)
        shapes = tuple(tuple(next(ahead) for _ in shape) for shape in move.shapes)
        return move._replace(nbytes=nbytes, flops=flops, tensors=tensors, shapes=shapes)
    return move._replace(nbytes=next(ahead))
