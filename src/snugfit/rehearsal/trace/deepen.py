"""Extend a recorded trace to more layers, from two small models of which one has one more repetition of the
layers.

Each phase of a run is extended separately (`grow.py`). Two events have the same key if they differ only in
numbers. Such numbers are layer numbers in a module's name, and, for a free, its block's position among live
blocks.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from snugfit.rehearsal.trace.grow import Entry, GrownElement, grow
from snugfit.rehearsal.trace.relative import (
    NUMBER,
    Alloc,
    Free,
    LiveSet,
    PhaseStart,
    RelativeTrace,
    TraceEvent,
    without_layer_numbers,
)
from snugfit.rehearsal.trace.trace import Kernel, MarkKind
from snugfit.results.footprint import Kind

PASSES = ("forward", "backward")
"""Phases of a step in which compiled programs run."""


def deepen(
    shallow: RelativeTrace, deeper: RelativeTrace, periods: int, *, compiled: bool = True
) -> RelativeTrace | None:
    """Extend the traces of two small models to a model with `periods` more repetitions of the layers. Return
    its trace or None.

    The deeper model has one period more than the shallow one. Return None if their traces do not differ by a
    period. In `compiled` passes, the order of consecutive frees depends on names, and is ignored.
    """
    passes = PASSES if compiled else ()
    few, more = _by_phase(shallow, passes), _by_phase(deeper, passes)
    if len(few) != len(more) or shallow.attention != deeper.attention:
        return None
    # A size that only one of the models has belongs to a buffer with an entry per layer (seeds of all
    # dropouts).
    known = [{_kind(event) for part in parts for event in part} for parts in (few, more)]
    written = _FullTrace(known[0] ^ known[1])
    for before, after in zip(few, more, strict=True):
        grown = grow(_entries(before, written.grows), _entries(after, written.grows), periods)
        if grown is None or not all(written.add(after[entry.like], entry) for entry in grown):
            return None
    return replace(deeper, moves=tuple(written.moves()))


def numbers_of(name: str) -> tuple[int, ...]:
    """Return the layer numbers in a module's dotted name."""
    return tuple(map(int, NUMBER.findall(name)))


class _PlacedFree(NamedTuple):
    """A free in a trace, with the freed block's position in its pile (the live blocks of equal size)."""

    pile: Alloc
    younger: int
    """Number of live blocks in its pile that were allocated after it."""
    older: int


_Step = Alloc | _PlacedFree | PhaseStart | Kernel | MarkKind


class _Piles:
    """The live blocks of a trace, on stacks by their properties, and in piles: the temporary blocks of equal
    size, regardless of operator. Piles exist because a buffer of a compiled program may reuse the memory of
    another operator's buffer.
    """

    def __init__(self) -> None:
        self._made = itertools.count()
        self._stacks: dict[Alloc, list[int]] = defaultdict(list)
        self.piles: dict[Alloc, list[int]] = defaultdict(list)
        self._allocs: dict[int, Alloc] = {}

    def alloc(self, alloc: Alloc) -> None:
        """Add a live memory block to its stack, and to the blocks of equal size (its pile)."""
        number = next(self._made)
        self._allocs[number] = alloc
        self._stacks[alloc.stack].append(number)
        self.piles[_pile_of(alloc)].append(number)

    def blocks_of(self, frees: Sequence[Any], *, by_name: bool) -> list[int]:
        """Return the memory blocks that these consecutive frees release.

        Their order does not matter. In a compiled program it follows from buffer names (`buf9`, `buf10`).
        With `by_name`, the blocks are sorted independently of names.
        """
        # Consecutive frees are removed in their recorded order, since each distance counts the remaining
        # blocks.
        freed = [self._stacks[free[0]].pop(-1 - free[1]) for free in frees]
        if not by_name:
            return freed
        # Inductor frees in the order of buffer names (`buf9`, `buf10`), which shifts with the depth.
        return sorted(freed, key=lambda number: (*_pile_of(self._allocs[number])[1:], number))

    def drop(self, number: int) -> _PlacedFree:
        """Remove a freed memory block from the blocks of equal size (its pile); it is already removed from
        its stack.
        """
        pile = _pile_of(self._allocs[number])
        blocks = self.piles[pile]
        older = blocks.index(number)
        del blocks[older]
        return _PlacedFree(pile, len(blocks) - older, older)


def _is_open(alloc: Alloc) -> bool:
    """Return True if the time of the block's free decides its category: activation or temporary."""
    # A layer's output may be an activation in one model and a temporary in the other.
    return alloc.phase == "forward" and alloc.kind in (Kind.ACTIVATIONS, Kind.TEMPORARIES)


@functools.lru_cache(maxsize=1 << 17)
def _pile_of(alloc: Alloc) -> Alloc:
    stack = alloc.stack
    # In a compiled program, a buffer reuses the place of another that a different operator allocated.
    return stack._replace(operator="", kind="") if _is_open(alloc) or not stack.kind else stack


def _by_phase(trace: RelativeTrace, compiled: Collection[str]) -> list[Sequence[_Step]]:
    """Return the events of a trace, split where phases begin. `compiled` are the phases in which compiled
    programs run.
    """
    piles, phase = _Piles(), ""
    parts: list[list[_Step]] = [[]]
    # Only consecutive frees are sorted; an allocation between two fixes their order.
    for frees, events in itertools.groupby(trace.moves, lambda event: type(event) is Free):
        if frees:
            parts[-1] += map(piles.drop, piles.blocks_of([*events], by_name=phase in compiled))
            continue
        for event in events:
            if type(event) is PhaseStart:
                parts.append([])
                phase = event.phase
            if type(event) is Alloc:
                piles.alloc(event)
            parts[-1].append(event)  # type: ignore[arg-type]
    return parts  # type: ignore[return-value]


def _kind(event: _Step) -> Hashable:
    """Return a key that is equal for an event of one layer and the same event of all other layers. The key of
    an allocation, and of its free, is the group of blocks with equal size.
    """
    if isinstance(event, (Alloc, _PlacedFree)):
        return _pile_of(event) if type(event) is Alloc else event[0]
    return event._replace(module=without_layer_numbers(event.module)) if type(event) is Kernel else event


def _entries(events: Sequence[_Step], grows: set[Hashable]) -> list[Entry]:
    """Return these events of a trace with their layer-dependent numbers separated, so that two models' events
    can be compared. Sizes of events with a key in `grows` count as such numbers.
    """
    return [_entry(event, _kind(event) in grows) for event in events]


def _entry(event: _Step, grows: bool) -> Entry:
    if type(event) is _PlacedFree:
        pile, younger, older = event
        size = (pile.nbytes,) if grows else ()
        return Entry(("free", _sizeless(pile) if grows else pile), (younger, older, *size))
    if isinstance(event, (Alloc, Kernel)):
        plain: Any = event._replace(module=without_layer_numbers(event.module))
        if type(event) is Alloc and _is_open(event):
            plain = plain._replace(kind="")
        sizes = _sizes(event) if grows else ()
        return Entry((type(event), _sizeless(plain) if grows else plain), (*numbers_of(event.module), *sizes))
    return Entry(event)


def _sizes(event: Alloc | Kernel) -> tuple[int, ...]:
    if type(event) is Kernel:
        return event.nbytes, event.flops, event.tensors, *(size for shape in event.shapes for size in shape)
    return (event.nbytes,)


def _sizeless(event: Any) -> Any:
    if type(event) is Kernel:
        shapes = tuple((0,) * len(shape) for shape in event.shapes)
        return event._replace(nbytes=0, flops=0, tensors=0, shapes=shapes)
    return event._replace(nbytes=0)


class _CopiedProperties(NamedTuple):
    """Properties that an event of a small model has in common with its copies in the deep one."""

    sized: bool
    """True if the event's sizes in bytes grow with the number of layers."""
    pile: Alloc | None
    """Pile (live blocks of equal size) to which the allocated block belongs; None for kernels."""
    is_open: bool

    @classmethod
    def of(cls, event: Alloc | Kernel, grows: set[Hashable]) -> _CopiedProperties:
        """Return the properties of this event. Sizes of events with a key in `grows` grow with the number of
        layers."""
        kind = _kind(event)
        if type(event) is Alloc:
            return cls(kind in grows, _pile_of(event), _is_open(event))
        return cls(kind in grows, None, is_open=False)


class _FullTrace:
    """Builder of the full model's trace from copies of a small model's events. Sizes of events with a key in
    `grows` grow with the number of layers.
    """

    def __init__(self, grows: set[Hashable]) -> None:
        self.grows = grows
        self._shared: dict[int, _CopiedProperties] = {}
        """Cached properties of the small model's events, by the event's id."""
        self._written: list[int | TraceEvent] = []
        """Events of the full model; a free is stored as the number of its block."""
        self._allocs: list[int] = []
        """Index in `_written` of each block's allocation."""
        self._piles: dict[Alloc, list[int]] = defaultdict(list)
        self._made_forward: set[int] = set()
        """Numbers of blocks that the current forward pass allocated and that are still live."""

    def add(self, like: _Step, grown: GrownElement) -> bool:
        """Append a copy of a small model's event with the full model's numbers. Return False if the block
        that it frees does not exist.
        """
        if type(like) is _PlacedFree:
            return self._free(like, grown)
        shared: Any = None
        if isinstance(like, (Alloc, Kernel)):
            # Each event is copied once per period, and hashing one is slow.
            if (shared := self._shared.get(id(like))) is None:
                shared = self._shared[id(like)] = _CopiedProperties.of(like, self.grows)
            like = _with_numbers(like, iter(grown.numbers), sized=shared.sized)
        if type(like) is PhaseStart:
            # Blocks that live until the next phase are activations, as in `Allocations`.
            for number in self._made_forward:
                self._is(number, Kind.ACTIVATIONS)
            self._made_forward.clear()
        if type(like) is Alloc:
            number = len(self._allocs)
            self._allocs.append(len(self._written))
            self._piles[_pile_of(like) if shared.sized else shared.pile].append(number)
            if shared.is_open:
                self._made_forward.add(number)
        self._written.append(like)  # type: ignore[arg-type]
        return True

    def _is(self, number: int, kind: Kind) -> None:
        alloc: Any = self._written[self._allocs[number]]
        self._written[self._allocs[number]] = alloc._replace(kind=kind)

    def _free(self, like: _PlacedFree, grown: GrownElement) -> bool:
        """Add the free of a memory block to the full model's trace; the block is found by its position among
        those of equal size.

        It counts from the end at which the position is the same at any depth. In a pile that never grows, the
        shallow model's block may be arbitrary. In such a pile, a compiled program's buffer reuses the place
        that was freed last.
        """
        younger, older, *size = grown.numbers
        blocks = self._piles[like.pile._replace(nbytes=size[0]) if size else like.pile]
        last = len(blocks) - 1
        # One end of the pile moves with the depth, so the free counts from the other end.
        if younger != like.younger:
            if older == like.older:
                younger = last - older
            # A pile that never grows reuses the place that was freed last, at any depth.
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

    def moves(self) -> Iterator[TraceEvent]:
        """Yield all events of the full model, each free with the position of its memory block."""
        live = LiveSet()
        for event in self._written:
            # Piles are used only to find the block. The trace refers to it by its stack again.
            if isinstance(event, int):
                yield live.free_of(event)
                continue
            if type(event) is Alloc:
                live.alloc(event)
            yield event


_MODULE_AT = {kind: kind._fields.index("module") for kind in (Alloc, Kernel)}
"""Index of the module's name among the fields of an event, by the event's class."""


@functools.cache
def _around_numbers(module: str) -> tuple[str, ...]:
    """Return the parts of a dotted name around its layer numbers."""
    return tuple(NUMBER.split(module))


def _with_numbers(event: Alloc | Kernel, ahead: Iterator[int], *, sized: bool) -> Alloc | Kernel:
    first, *parts = _around_numbers(event.module)
    if parts:
        module = first + "".join([f"{next(ahead)}{part}" for part in parts])
        kind, at = type(event), _MODULE_AT[type(event)]
        # `tuple.__new__` skips `_replace`, which is slow: there is one call per event of the deep model.
        event = tuple.__new__(kind, (*event[:at], module, *event[at + 1 :]))
    if not sized:
        return event
    if type(event) is Kernel:
        nbytes, flops, tensors = next(ahead), next(ahead), next(ahead)
        shapes = tuple(tuple(next(ahead) for _ in shape) for shape in event.shapes)
        return event._replace(nbytes=nbytes, flops=flops, tensors=tensors, shapes=shapes)
    return event._replace(nbytes=next(ahead))
