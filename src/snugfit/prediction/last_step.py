"""Further replays of a trace's last step in the allocator, since later steps may still reserve more memory.

A trace ends with the first step whose allocations all later steps repeat. That step splits the free blocks of
earlier ones in its own way. In the next step, a block that was whole before may be in two pieces. The
allocator then maps one more segment. A Llama and a Gemma 2 on an H100 mapped 12 and 2 MiB more in the fourth
step. So the allocator replays the step until its initial state repeats, block by block and address by
address. Later steps change nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping
from typing import Any, Protocol

from snugfit.rehearsal.trace.relative import Alloc, Free, LiveSet
from snugfit.rehearsal.trace.trace import Memory, Trace

MOST_REPEATED = 12
"""Largest number of replays of the last step, if the allocator's state before the step never repeats."""


NO_LATE_FREES: Mapping[int, int] = {}


class FreesBlocks(Protocol):
    """Protocol: a simulated allocator that frees blocks."""

    def release(self, block: Any) -> None:
        """Free an allocated block for reuse."""

    def drop(self, block: Any) -> None:
        """Count a block as freed but not reusable, since another stream still uses it."""

    def take_back(self, block: Any) -> None:
        """Make a block that `drop` counted as freed reusable."""


class Frees:
    """The pending frees of one allocator, some of which are `late` because another stream uses the block.

    `late` maps the event of such a free to the later event before which the block is reusable.
    """

    def __init__(self, allocator: FreesBlocks, late: Mapping[int, int]) -> None:
        self._allocator, self._late = allocator, late
        self._dropped: list[tuple[int, int, Any]] = []  # when it is back, a number of its own, the block

    def free(self, event: int, block: Any) -> None:
        """Free a block at this event. If its free is late, only count the block as freed, and make it
        reusable later."""
        if event not in self._late:
            self._allocator.release(block)
            return
        self._allocator.drop(block)
        heapq.heappush(self._dropped, (self._late[event], event, block))

    def pass_by(self, event: int) -> None:
        """Make blocks reusable whose late free is due before the event `event`."""
        # The root of the heap is the earliest free.
        while self._dropped and self._dropped[0][0] <= event:
            self._allocator.take_back(heapq.heappop(self._dropped)[2])

    def finish(self) -> None:
        """Make all blocks with late frees reusable at the end of a step, when all streams have finished."""
        while self._dropped:
            self._allocator.take_back(heapq.heappop(self._dropped)[2])


class Allocates(Protocol):
    """Protocol: a simulated allocator that allocates blocks."""

    def allocate(self, nbytes: int, memory: Memory, stream: int) -> Any:
        """Allocate and return a block of at least this number of bytes, of this kind of memory and CUDA
        stream."""

    def empty_cache(self) -> None:
        """Release whole free segments to the device."""


class LastStep:
    """A trace's last step, which can be replayed again. It begins after `start` events. `live` are the
    allocator's blocks still allocated after it, by block number."""

    def __init__(self, trace: Trace, start: int, live: Mapping[int, Any]) -> None:
        self._start = start
        self._live = LiveSet()
        # Blocks from before the step keep their order, so that a free finds its block by position.
        before = [index + 1 for index in trace.alive_at(start - 1)]
        numbers = {number: self._live.alloc(_alloc_of(trace, number)) for number in before}
        self._moves: list[tuple[Alloc | Free, Memory, int]] = []
        for event in trace.events[start:]:
            if event > 0:
                alloc = _alloc_of(trace, event)
                numbers[event] = self._live.alloc(alloc)
                self._moves.append((alloc, trace.memory_of(event - 1), trace.streams.get(event - 1, 0)))
            else:
                # A free needs neither memory nor stream.
                self._moves.append((self._live.free_of(numbers[-event]), Memory.OWN, 0))
        self._blocks: list[Any] = [live.get(number) for number in numbers]

    @property
    def leaves_as_many(self) -> bool:
        """True if the step frees as many blocks as it allocates, for each size, operator and module. Only
        such a step can be replayed.
        """
        allocated = Counter([move.stack for move, *_ in self._moves if type(move) is Alloc])
        return allocated == Counter([move.stack for move, *_ in self._moves if type(move) is Free])

    def begins(self) -> Hashable:
        """Return the addresses of allocated blocks that the step may free, as the state in which the step
        begins."""
        # A set is compared, because the order of stacks has no meaning.
        blocks = self._blocks
        return frozenset(
            (stack, tuple([blocks[index].address for index in indices]))
            for stack, indices in self._live.stacks.items()
            if indices
        )

    def run_again(self, allocator: Allocates, frees: Frees, emptied: Collection[int]) -> None:
        """Replay the step's allocations and frees once more. `frees` performs the frees, some of them late.

        Before the events in `emptied`, the allocator releases its cached segments.
        """
        for index, (move, memory, stream) in enumerate(self._moves, start=self._start):
            if index in emptied:
                allocator.empty_cache()
            if isinstance(move, Alloc):
                frees.pass_by(index)
                self._live.alloc(move)
                self._blocks.append(allocator.allocate(move.nbytes, memory, stream))
            else:
                # Positions repeat with each run of the step, so late frees happen at the same events.
                frees.free(index, self._blocks[self._live.free(move)])
        frees.finish()


def begin_of_last_step(trace: Trace) -> int:
    """Return the number of events before the last step; -1 if there is only one step."""
    phases = trace.phases
    last = phases[-1].step if phases else -1
    # One step alone has no earlier one to compare with.
    return next(mark.event for mark in phases if mark.step == last) if last > 0 else -1


def places(trace: Trace, live: Mapping[int, Any]) -> Hashable:
    """Return the addresses of allocated blocks, grouped by equal properties, as a state for comparing two
    steps."""
    stacks: dict[Alloc, list[int]] = defaultdict(list)
    for number, block in live.items():
        stacks[_alloc_of(trace, number).stack].append(block.address)
    return frozenset((stack, tuple(addresses)) for stack, addresses in stacks.items())


def _alloc_of(trace: Trace, number: int) -> Alloc:
    nbytes, operator, module, phase, _, kind, _ = trace.blocks[number - 1]
    return Alloc(nbytes, operator, module, phase, kind)
