"""A simulation of PyTorch's CUDA caching allocator, which rounds requests and splits and caches blocks.

A port of the decisions (not the code) of `c10/cuda/CUDACachingAllocator.cpp` and `AllocatorConfig.h`, torch
2.13, default configuration and `expandable_segments`.

**Addresses.** `DeviceAddresses` simulates the addresses at which the CUDA driver maps new segments of GPU
memory. Their order determines the free block that the caching allocator reuses.

The caching allocator takes, among free blocks of one size, the one at the lowest address. The driver
determines that order when it maps segments, and does not document it. These rules are inferred from nine
recorded runs on H200s (driver 580.159.04, torch 2.11, 2026-11-20 and -22). Further evidence is single
operators (`results/h200-2026-11-22/holes.json`), and runs on an H100 (2026-11-26), which the rules name.
Replayed with the recorded addresses, the allocator of `allocator.py` gives every block its recorded address.
With these rules, its reserved and allocated bytes equal the recorded ones in all nine runs. In five of them
it makes the same choice at every block.

Other mappings of the driver and of libraries only shift addresses and change no order.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from snugfit.prediction.last_step import (
    MOST_REPEATED,
    NO_LATE_FREES,
    Frees,
    LastStep,
    begin_of_last_step,
    places,
)
from snugfit.rehearsal.trace.trace import MarkKind, Memory, Period, Trace

# Sizes are rounded up to 512 B. Blocks up to 1 MiB are in the small pool, larger ones in the large pool.
MINIMUM = 512
SMALL = 1 << 20
# A new segment has 2 MiB in the small pool. In the large pool it has 20 MiB for blocks under 10 MiB, else a
# multiple of 2 MiB.
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
LARGE_FROM = 10 << 20
LARGE_ROUND = 2 << 20

OF_GRAPHS, OF_STREAM = 2, 4
"""Offsets of the numbers of memory pools. Pools 0 and 1 have large and small blocks; pools 2 and 3 have those
of CUDA graphs. Each further CUDA stream has four further pools.
"""

RANGE_BITS = 44
"""Number of address bits of the range that each pool has if segments are expandable. The range is larger than
any GPU's memory.
"""

CUBLAS_WORKSPACE = "cuBLAS workspace"
"""Operator name of a trace's block for cuBLAS's workspace. Its allocation marks the first use of cuBLAS."""


class _PoolBlock:
    """A free or allocated block of a segment, like the struct `Block` of PyTorch's C++ allocator."""

    __slots__ = ("address", "after", "before", "free", "is_mapped", "pool", "requested", "size")

    def __init__(self, size: int, address: int, pool: int, *, is_mapped: bool = True) -> None:
        self.size, self.address, self.pool = size, address, pool
        self.before: _PoolBlock | None = None
        self.after: _PoolBlock | None = None
        # Addresses without memory are no free block.
        self.free = self.is_mapped = is_mapped
        self.requested = 0

    def link(self, before: _PoolBlock | None) -> None:
        """Make `before` and the block, with the one after it, neighbours."""
        self.before = before
        if before is not None:
            before.after = self
        if self.after is not None:
            self.after.before = self

    @property
    def room(self) -> int:
        """Return the bytes that are free or without memory from the block's begin on, up to the first
        allocated block.
        """
        room = 0
        block: _PoolBlock | None = self
        while block is not None and (block.free or not block.is_mapped):
            room, block = room + block.size, block.after
        return room


class Allocator:
    """A simulated CUDA caching allocator of one GPU."""

    def __init__(self, *, expandable: bool = False) -> None:
        self.expandable = expandable
        self.limit = math.inf
        """Largest reserved bytes, above which cached segments are released."""
        self.retries = 0
        """Number of times that the allocator released cached segments because an allocation exceeded
        `limit`."""
        self.allocated = self.reserved = self.requested = 0
        self.allocated_peak = self.reserved_peak = self.requested_peak = 0
        # Free blocks of a pool are sorted by size and address, so the first large enough one is the best fit.
        self._free = defaultdict[int, list[tuple[int, int, _PoolBlock]]](list)
        self.addresses = DeviceAddresses()
        # Addresses without memory in the ranges of expandable segments, by pool, ascending.
        self._unmapped = defaultdict[int, list[_PoolBlock]](list)

    def allocate(self, nbytes: int, memory: Memory = Memory.OWN, stream: int = 0) -> _PoolBlock:
        """Allocate and return a block of at least `nbytes` bytes, from the pool of this kind of memory and
        CUDA stream."""
        size = -(-nbytes // MINIMUM) * MINIMUM or MINIMUM
        small = size <= SMALL
        pool = small + OF_GRAPHS * (memory is Memory.GRAPHS) + OF_STREAM * stream
        block = self._best_fit(size, pool) or self._allocate_segment(size, pool)
        remaining = block.size - size
        # A block is split if its remainder has 512 B (small pool), or more than 1 MiB (large pool).
        if remaining >= MINIMUM if small or self.expandable else remaining > SMALL:
            self._split(block, size)
        block.free, block.requested = False, nbytes
        # An unsplit block counts as a whole, so `allocated` is larger than the request.
        self.allocated += block.size
        self.requested += nbytes
        if self.allocated > self.allocated_peak:  # noqa: PLR1730 - `max` takes longer, millions of times
            self.allocated_peak = self.allocated
        if self.requested > self.requested_peak:  # noqa: PLR1730
            self.requested_peak = self.requested
        return block

    def release(self, block: _PoolBlock) -> None:
        """Free an allocated block for reuse, and merge it with its free neighbours."""
        self.drop(block)
        self.take_back(block)

    def drop(self, block: _PoolBlock) -> None:
        """Count a block as freed but not reusable, since another stream still uses it. It keeps its address,
        and its bytes still count as requested."""
        self.allocated -= block.size

    def take_back(self, block: _PoolBlock) -> None:
        """Make a block that `drop` counted as freed reusable, and merge it with its free neighbours."""
        self.requested -= block.requested
        block.free = True
        # A freed block merges with free neighbours of its segment, and does not return to the device.
        if (before := block.before) is not None and before.free:
            self._remove_free(before)
            block.address, block.size = before.address, block.size + before.size
            block.link(before.before)
        if (after := block.after) is not None and after.free:
            self._remove_free(after)
            block.size, block.after = block.size + after.size, after.after
            block.link(block.before)
        self._insert_free(block)

    def state(self) -> Hashable:
        """Return the reserved bytes and free blocks of each pool, on which the allocator's next choices
        depend."""
        # Allocated blocks are left out: `places` compares those that a step frees.
        return self.reserved, *(tuple((size, at) for size, at, _ in pool) for pool in self._free.values())

    def free_blocks(self) -> list[_PoolBlock]:
        """Return the free blocks of all pools, which the allocator caches."""
        return [block for pool in self._free.values() for _, _, block in pool]

    def _best_fit(self, size: int, number: int) -> _PoolBlock | None:
        pool = self._free[number]
        index = bisect.bisect_left(pool, (size,))
        if index == len(pool):
            return None
        # A block that can grow is used only if no other block fits.
        while self.expandable and index + 1 < len(pool) and pool[index + 1][2].room < pool[index][2].room:
            index += 1
        return pool.pop(index)[2]

    def _allocate_segment(self, size: int, pool: int) -> _PoolBlock:
        if self.expandable:
            return self._grow(size, pool)
        if is_small(pool):
            segment = SMALL_SEGMENT
        elif size < LARGE_FROM:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // LARGE_ROUND) * LARGE_ROUND
        self._reserve(segment)
        return _PoolBlock(segment, self.addresses.map_segment(segment), pool)

    def _grow(self, size: int, pool: int) -> _PoolBlock:
        """Map memory of whole pages in the pool's expandable segment, at the lowest addresses with room for
        `size` bytes. Return the new block, which includes free ones among these addresses.
        """
        unmapped = self._unmapped[pool]
        if not unmapped:
            # Each pool has its own range of addresses, numbered in the order of first use.
            start = len(self._unmapped) << RANGE_BITS
            unmapped.append(_PoolBlock(1 << RANGE_BITS, start, pool, is_mapped=False))
        chosen = next(one for one in unmapped if _free_before(one) + one.room >= size)
        block = self._map(chosen, size - _free_before(chosen))
        while block.size < size:
            assert block.after is not None
            block = self._map(block.after, size - block.size)
        self._remove_free(block)
        return block

    def _map(self, unmapped: _PoolBlock, size: int) -> _PoolBlock:
        """Map memory at the first addresses of a range without memory: whole pages for `size` bytes, or all
        of the range. Return the free block that has it.
        """
        page = _page(unmapped.pool)
        mapped = min(-(-size // page) * page, unmapped.size)
        self._reserve(mapped)
        block = _PoolBlock(mapped, unmapped.address, unmapped.pool)
        block.after, before = unmapped, unmapped.before
        unmapped.address, unmapped.size = unmapped.address + mapped, unmapped.size - mapped
        block.link(before)
        if not unmapped.size:
            block.after = unmapped.after
            block.link(before)
            self._unmapped[block.pool].remove(unmapped)
        self.take_back(block)
        return block

    def empty_cache(self) -> None:
        """Release whole free segments to the device, or whole free pages of expandable segments."""
        self._release_cached(self._unmap if self.expandable else self._release_segment)

    def _release_cached(self, release: Callable[[_PoolBlock], None]) -> None:
        """Call `release` with each free block. Pools of CUDA graphs release none."""
        for pool in [free for number, free in self._free.items() if number % OF_STREAM < OF_GRAPHS]:
            for _, _, block in [*pool]:
                release(block)

    def _release_segment(self, block: _PoolBlock) -> None:
        """Release a free block to the device if it is a whole segment."""
        # Only None is on both sides.
        if block.before is block.after:
            self._remove_free(block)
            self.reserved -= block.size

    def _unmap(self, block: _PoolBlock) -> None:
        """Release the whole pages of a free block to the device. Its addresses stay in the pool's range
        (`unmap_block` of torch).
        """
        # Pages are counted from the begin of the range.
        page, start = _page(block.pool), block.address >> RANGE_BITS << RANGE_BITS
        begin = start + -(-(block.address - start) // page) * page
        end = start + (block.address + block.size - start) // page * page
        if begin >= end:
            return
        self._remove_free(block)
        if end < block.address + block.size:
            self._split(block, end - block.address)
        if block.address < begin:
            self._split(block, begin - block.address)
            self._insert_free(block)
            assert block.after is not None
            block = block.after
            self._remove_free(block)
        block.free = block.is_mapped = False
        self.reserved -= block.size
        bisect.insort(self._unmapped[block.pool], block, key=lambda one: one.address)

    def _reserve(self, nbytes: int) -> None:
        if self.reserved + nbytes > self.limit:
            # Before it fails, the allocator releases whole free segments.
            self._release_cached(self._release_segment)
            self.retries += 1
        self.reserved += nbytes
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def _split(self, block: _PoolBlock, size: int) -> None:
        rest = _PoolBlock(block.size - size, block.address + size, block.pool)
        rest.after, block.size = block.after, size
        rest.link(block)
        self._insert_free(rest)

    def _insert_free(self, block: _PoolBlock) -> None:
        bisect.insort(self._free[block.pool], (block.size, block.address, block))

    def _remove_free(self, block: _PoolBlock) -> None:
        pool = self._free[block.pool]
        pool.pop(bisect.bisect_left(pool, (block.size, block.address)))


@dataclass(frozen=True)
class Replay:
    """The allocator's statistics for a trace: peaks, and reserved bytes after each allocation or free. All
    sizes are in bytes."""

    requested_peak: int
    allocated_peak: int
    reserved_peak: int
    reserved: Sequence[int]
    """Reserved bytes after each event."""
    retries: int = 0
    """Number of times that the allocator released cached segments because an allocation exceeded the
    limit."""


def replay(
    trace: Trace,
    *,
    expandable: bool = False,
    limit: float = math.inf,
    late: Mapping[int, int] = NO_LATE_FREES,
) -> Replay:
    """Run the trace's allocations and frees through the allocator, and return its statistics.

    While the model is built, the allocator releases cached segments at `limit` reserved bytes. The last step
    is repeated until the allocator's state repeats (`last_step.py`). `late` maps the events of some frees to
    later events, before which they happen (`Exchanges.late_frees`).
    """
    allocator = Allocator(expandable=expandable)
    frees = Frees(allocator, late)
    allocator.limit = limit
    emptied = {mark.event for mark in trace.marks if mark.kind is MarkKind.CACHE_EMPTIED}
    live: dict[int, _PoolBlock] = {}
    reserved: list[int] = []
    blocks, streams, events = trace.blocks, trace.streams, trace.events
    actions = driver_actions(trace, allocator.addresses)
    start, began = begin_of_last_step(trace), None
    repeats = Repeats(trace, {*emptied, *_before(events, actions)})
    # Late frees belong to single events, so all events are replayed.
    repetitions = {} if late else repeats.begins
    index = 0
    while index < len(events):
        if index == start:
            began = allocator.state(), places(trace, live)
        if index in repetitions:
            skipped = repeats.skip(index, allocator.state(), live)
            if skipped.events:
                live = skipped.live
                reserved += reserved[-skipped.period :] * (skipped.events // skipped.period)
                index += skipped.events
                continue
        event = events[index]
        if index in emptied:
            allocator.empty_cache()
        if event > 0:
            frees.pass_by(index)
            for act in actions.get(event, ()):
                act()
            if blocks[event - 1].step >= 0:
                allocator.limit = math.inf
            live[event] = allocator.allocate(
                blocks[event - 1].nbytes, trace.memory_of(event - 1), streams.get(event - 1, 0)
            )
        else:
            frees.free(index, live.pop(-event))
        reserved.append(allocator.reserved)
        index += 1
    frees.finish()
    # The last step may reserve more if its first free blocks differ from those at its end.
    if began is not None and (allocator.state(), places(trace, live)) != began:
        last = LastStep(trace, start, live)
        if last.leaves_as_many:
            _replay_again(allocator, frees, last, emptied, {began})
    return _replay_of(allocator, reserved)


def _replay_of(allocator: Allocator, reserved: Sequence[int]) -> Replay:
    peaks = allocator.requested_peak, allocator.allocated_peak, allocator.reserved_peak
    return Replay(*peaks, reserved, allocator.retries)


def _before(events: Sequence[int], numbers: Collection[int]) -> Iterator[int]:
    """Yield the indices of the `events` that allocate a block with one of these numbers."""
    return (index for index, event in enumerate(events) if event in numbers)


class SkippedEvents(NamedTuple):
    """Number of events that a replay skips, because they only repeat earlier allocations and frees."""

    events: int
    period: int = 1
    """Number of events of one repetition, after which the allocator's state is the same as before."""
    live: dict[int, _PoolBlock] = {}  # noqa: RUF012 - never changed
    """Blocks that are allocated after the skipped events, by block number."""


class Repeats:
    """Detects repetitions in a trace (`Trace.periods`) that need no replay, because they begin with the same
    free and live blocks as the one before. `single` are events that happen once.
    """

    def __init__(self, trace: Trace, single: Collection[int]) -> None:
        self.begins: dict[int, Period] = {}
        """The repeated part of the trace, by the index of the event at which each of its repetitions begins,
        except the first.
        """
        for period in trace.periods:
            end = period.start + period.events * period.times
            if not any(period.start <= event < end for event in single):
                starts = range(period.start + period.events, end, period.events)
                self.begins |= dict.fromkeys(starts, period)
        self._events = trace.events
        self._known: dict[int, dict[Hashable, int]] = defaultdict(dict)

    def skip(self, index: int, state: Hashable, live: Mapping[int, _PoolBlock]) -> SkippedEvents:
        """Return the number of events from `index` on that need no replay in this allocator state, and the
        blocks after them."""
        period = self.begins[index]
        time = (index - period.start) // period.events
        oldest = self._first_block(period)
        moved = period.blocks * time
        # The numbers of the period's own blocks are shifted back, so that equal states are equal tuples.
        own = tuple([(number - moved, block.address) for number, block in live.items() if number >= oldest])
        known = self._known[period.start]
        # The same state occurred some repetitions ago, so the events since then repeat.
        before = known.setdefault((state, own), time)
        if before == time:
            return SkippedEvents(0)
        cycle = time - before
        times = (period.times - time) // cycle * cycle
        by = period.blocks * times
        return SkippedEvents(
            period.events * times,
            period.events * cycle,
            {number + by if number >= oldest else number: block for number, block in live.items()},
        )

    def _first_block(self, period: Period) -> int:
        end = period.start + period.events
        return next((event for event in self._events[period.start : end] if event > 0), len(self._events))


def _replay_again(
    allocator: Allocator, frees: Frees, last: LastStep, emptied: Collection[int], began: set[Hashable]
) -> None:
    """Replay the last step until the allocator's initial state repeats. `began` are the states before earlier
    replays.
    """
    for _ in range(MOST_REPEATED):
        begins = allocator.state(), last.begins()
        if begins in began:
            return
        began.add(begins)
        last.run_again(allocator, frees, emptied)


def _free_before(block: _PoolBlock) -> int:
    """Return the free bytes right before a block."""
    before = block.before
    return before.size if before is not None and before.free else 0


def _page(pool: int) -> int:
    """Return the bytes of a page of the pool's expandable segment."""
    return SMALL_SEGMENT if is_small(pool) else LARGE_SEGMENT


def is_small(pool: int) -> bool:
    """Return True if the pool of this number is for blocks of up to 1 MiB."""
    return pool % 2 == 1


def actions_by_word(addresses: DeviceAddresses) -> dict[str, Callable[[], None]]:
    """Return functions that change the CUDA driver's free addresses, by the mark, phase or operator that
    triggers them.

    Each happens once: when the context's chunk is released, or before the first block of the phase or
    operator.
    """
    return {
        MarkKind.CONTEXT_RELEASED: addresses.release_context,
        "forward": addresses.begin_forward,
        "backward": addresses.begin_backward,
        CUBLAS_WORKSPACE: addresses.start_cublas,
    }


def driver_actions(trace: Trace, addresses: DeviceAddresses) -> Mapping[int, Sequence[Callable[[], None]]]:
    """Return functions that change the CUDA driver's free addresses, by the number of the block before which
    each runs.
    """
    pending = actions_by_word(addresses)
    release = next((mark for mark in trace.marks if mark.kind is MarkKind.CONTEXT_RELEASED), None)
    actions: dict[int, list[Callable[[], None]]] = {}
    for index, event in enumerate(trace.events):
        if event < 0:
            continue
        words = [trace.blocks[event - 1].phase, trace.blocks[event - 1].operator]
        # The release comes first if both happen before the same block.
        if release is not None and release.event <= index:
            words[:0] = release.phase, release.kind
            release = None
        if due := [pending.pop(word) for word in words if word in pending]:
            # Each word (phase or operator name) triggers one action, at its first block.
            actions[event] = due
        if not pending:
            break
    return actions


# ---- addresses ---------------------------------------------------------------------------------------------


MIB = 1 << 20
# The driver divides address space into chunks of whole 32 MiB.
CHUNK = 32 * MIB
TOP = 1 << 46
"""Address of the CUDA context's own chunk (range) of address space. All later segments are below it, except
those in the chunk itself.
"""
# At first there is one chunk of 416 MiB above all later ones. The context occupies its lower 414 MiB.
OWN_CHUNK, OWN, LOWEST = 416 * MIB, 414 * MIB, 32 * MIB
"""Sizes in bytes: the CUDA context's own chunk, its occupied part, and the part that stays empty after the
chunk's release."""
ABOVE_OWN = (TOP + OWN, OWN_CHUNK - OWN)
# Another chunk of 32 MiB is 64 MiB higher. The context occupies its lower 8 MiB.
HIGHEST = (TOP + 488 * MIB, 24 * MIB)
"""Free ranges of addresses before the first allocation: (address, size in bytes). Only the order of the
addresses matters."""
# Runs of two ViTs show these counts. A BERT loaded as much code, but before its backward pass.
CODE, FORWARD_CODE, BACKWARD_CODE = 2 * MIB, 2, 5
"""Bytes of address space that one load of kernel code takes, and numbers of loads in the first forward and
backward pass.
"""
# In a run of Whisper on an H100, a hole of 52 MiB was full at that moment (2026-11-26).
CUBLAS, LIBRARIES = 64 * MIB, 192 * MIB
"""Bytes of address space that cuBLAS takes at its first use, and those of the libraries that it loads.
Libraries take it in portions of `CODE` bytes.
"""


class DeviceAddresses:
    """A model of the CUDA driver that gives new segments their addresses."""

    def __init__(self) -> None:
        self._lowest = TOP
        self._holes = [ABOVE_OWN, HIGHEST]  # free ranges (address, size), ascending
        self._room = 0  # bytes for new chunks in place of the context's own chunk, above its lowest

    def map_segment(self, size: int) -> int:
        """Return the address of a new segment of `size` bytes."""
        return self._reserve_space(size)

    def release_context(self) -> None:
        """Free the part of the CUDA context's memory chunk that later segments may use."""
        # The code of the first kernels takes its address space before the context releases its own.
        self._reserve_space(CODE)
        # No segment is in the 2 MiB above, so the driver releases the whole chunk. New chunks take its place.
        if ABOVE_OWN in self._holes:
            self._holes.remove(ABOVE_OWN)
            # In two runs on an H100, the lowest 32 MiB of this range stayed empty.
            self._room = OWN_CHUNK - LOWEST
        else:
            # A segment prevents the release of the chunk, so the released 414 MiB are a hole below the
            # segment.
            bisect.insort(self._holes, (TOP, OWN))

    def begin_forward(self) -> None:
        """Mark addresses as used by kernel code, which CUDA loads in the first forward pass."""
        for _ in range(FORWARD_CODE):
            self._reserve_space(CODE)

    def begin_backward(self) -> None:
        """Mark addresses as used by kernel code, which CUDA loads in the first backward pass."""
        for _ in range(BACKWARD_CODE):
            self._reserve_space(CODE)

    def start_cublas(self) -> None:
        """Reserve cuBLAS's address space, and that of its libraries, in a chunk that the context used
        before.
        """
        # cuBLAS takes its address space from the holes, 2 MiB at a time.
        for _ in range(CUBLAS // CODE):
            self._reserve_space(CODE)
        # In another run on an H100, the libraries took this amount, and three new chunks were below it.
        self._room = max(0, self._room - LIBRARIES)

    def _reserve_space(self, size: int) -> int:
        address = self._from_hole(size)
        if address is None:
            chunk = -(-size // CHUNK) * CHUNK
            # If no hole is large enough, a new chunk is created right below all others. Its upper remainder
            # is a hole.
            address = self._new_chunk(chunk)
            if chunk > size:
                bisect.insort(self._holes, (address + size, chunk - size))
        return address

    def _from_hole(self, size: int) -> int | None:
        # A segment is placed in the lowest hole into which it fits, at the hole's lower end.
        for index, (address, space) in enumerate(self._holes):
            if space >= size:
                if space == size:
                    del self._holes[index]
                else:
                    self._holes[index] = (address + size, space - size)
                return address
        return None

    def _new_chunk(self, chunk: int) -> int:
        if chunk <= self._room:
            self._room -= chunk
            # New chunks fill the range of the context's own chunk downwards.
            return TOP + LOWEST + self._room
        self._lowest -= chunk
        return self._lowest
