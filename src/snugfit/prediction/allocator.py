"""The CUDA caching allocator, replayed: what requests become once they are rounded, split and cached.

A port of the decisions (not the code) of `c10/cuda/CUDACachingAllocator.cpp` and `AllocatorConfig.h`, torch
2.13, default configuration and `expandable_segments`, one stream:

1. A size is rounded up to 512 B. Up to 1 MiB it belongs to the small pool, above to the large one.
2. Best fit: the smallest free block of the pool that is large enough, the lowest address among equals.
3. On a miss a segment is taken from the device: 2 MiB for the small pool, 20 MiB for sizes under 10 MiB,
   else the size rounded up to 2 MiB. If the device refuses, every wholly free segment is given back and the
   device is asked once more (a retry); then it is out of memory.
4. A block is split when what would remain is worth it: 512 B in the small pool, more than 1 MiB in the
   large one. An unsplit block is handed out whole, so `allocated` counts more than was requested.
5. A freed block merges with free neighbours of its segment. Nothing goes back to the device by itself.
6. With expandable segments a pool is one address range that grows by whole pages (2 MiB, 20 MiB) at its
   end, and every block splits at 512 B. The block at the end of the range, which could still grow, is handed
   out only when no other fits.

Addresses matter only as an order; `addresses.py` says in which order the driver hands out segments.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from snugfit.prediction.addresses import DeviceAddresses
from snugfit.rehearsal.device.context import SETTLED
from snugfit.rehearsal.trace.trace import Block, Trace

MINIMUM = 512
SMALL = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
LARGE_FROM = 10 << 20
LARGE_ROUND = 2 << 20

CUBLAS_WORKSPACE = "cuBLAS workspace"
"""The trace's name of the block that shows that cuBLAS has started."""


class OutOfDeviceMemory(Exception):
    """The device refused a segment, also after the cache was given back."""

    def __init__(self, requested: int, reserved: int) -> None:
        super().__init__(f"{requested} bytes refused at {reserved} reserved")
        self.requested, self.reserved = requested, reserved


class _Piece:
    """A block of a segment: free or handed out."""

    __slots__ = ("address", "after", "before", "free", "requested", "size", "small")

    def __init__(self, size: int, address: int, small: bool) -> None:
        self.size, self.address, self.small = size, address, small
        self.before: _Piece | None = None
        self.after: _Piece | None = None
        self.free = True
        self.requested = 0


class Allocator:
    """The caching allocator of one GPU. `limit` is what the device can give in bytes, None for all."""

    def __init__(self, *, expandable: bool = False, limit: int | None = None) -> None:
        self.expandable, self.limit = expandable, limit
        self.allocated = self.reserved = self.requested = 0
        self.allocated_peak = self.reserved_peak = self.requested_peak = 0
        self.retries = 0
        self._free: dict[bool, list[tuple[int, int, _Piece]]] = {True: [], False: []}
        self.addresses = DeviceAddresses()
        self._range_end: dict[bool, _Piece | None] = {True: None, False: None}
        self._range_next: dict[bool, int] = {True: 1 << 41, False: 1 << 45}

    def allocate(self, nbytes: int) -> _Piece:
        """Hands out a block; raises `OutOfDeviceMemory`."""
        size = max(-(-nbytes // MINIMUM) * MINIMUM, MINIMUM)
        small = size <= SMALL
        piece = self._fitting(size, small) or self._from_device(size, small)
        if piece is None:
            self.retries += 1
            self.give_back()
            piece = self._from_device(size, small)
            if piece is None:
                raise OutOfDeviceMemory(nbytes, self.reserved)
        remaining = piece.size - size
        if remaining >= MINIMUM if small or self.expandable else remaining > SMALL:
            self._split(piece, size)
        piece.free, piece.requested = False, nbytes
        self.allocated += piece.size
        self.requested += nbytes
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        self.requested_peak = max(self.requested_peak, self.requested)
        return piece

    def release(self, piece: _Piece) -> None:
        """Takes a block back and merges it with its free neighbours."""
        self.allocated -= piece.size
        self.requested -= piece.requested
        piece.free = True
        if (before := piece.before) is not None and before.free:
            self._forget(before)
            piece.address, piece.size, piece.before = before.address, piece.size + before.size, before.before
            if piece.before is not None:
                piece.before.after = piece
        if (after := piece.after) is not None and after.free:
            self._forget(after)
            piece.size, piece.after = piece.size + after.size, after.after
            if piece.after is not None:
                piece.after.before = piece
            if self._range_end[piece.small] is after:
                self._range_end[piece.small] = piece
        self._keep(piece)

    def state(self) -> Hashable:
        """All that what it does next depends on, beside the blocks that are handed out."""
        return self.reserved, *(tuple((size, at) for size, at, _ in pool) for pool in self._free.values())

    def give_back(self) -> None:
        """Returns every wholly free segment to the device (`release_cached_blocks`)."""
        for small in (True, False):
            for _, _, piece in list(self._free[small]):
                whole = piece.before is None and piece.after is None
                if whole or (self.expandable and piece.after is None):
                    self._unmap(piece) if self.expandable else self._drop(piece)

    def _fitting(self, size: int, small: bool) -> _Piece | None:
        pool = self._free[small]
        place = bisect.bisect_left(pool, (size,))
        if place == len(pool):
            return None
        end = self._range_end[small]
        if self.expandable and pool[place][2] is end and place + 1 < len(pool):
            place += 1
        return pool.pop(place)[2]

    def _from_device(self, size: int, small: bool) -> _Piece | None:
        if self.expandable:
            return self._grow(size, small)
        if small:
            segment = SMALL_SEGMENT
        elif size < LARGE_FROM:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // LARGE_ROUND) * LARGE_ROUND
        if not self._granted(segment):
            return None
        return _Piece(segment, self.addresses.take(segment), small)

    def _grow(self, size: int, small: bool) -> _Piece | None:
        """Maps whole pages behind the pool's last block, which is used as far as it is free."""
        last = self._range_end[small]
        have = last.size if last is not None and last.free else 0
        page = SMALL_SEGMENT if small else LARGE_SEGMENT
        mapped = -(-(size - have) // page) * page
        if not self._granted(mapped):
            return None
        if last is not None and last.free:
            self._forget(last)
            last.size += mapped
            self._range_next[small] += mapped
            return last
        piece = _Piece(mapped, self._range_next[small], small)
        self._range_next[small] += mapped
        piece.before = last
        if last is not None:
            last.after = piece
        self._range_end[small] = piece
        return piece

    def _granted(self, nbytes: int) -> bool:
        if self.limit is not None and self.reserved + nbytes > self.limit:
            return False
        self.reserved += nbytes
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return True

    def _split(self, piece: _Piece, size: int) -> None:
        rest = _Piece(piece.size - size, piece.address + size, piece.small)
        rest.before, rest.after = piece, piece.after
        if rest.after is not None:
            rest.after.before = rest
        piece.after, piece.size = rest, size
        if self._range_end[piece.small] is piece:
            self._range_end[piece.small] = rest
        self._keep(rest)

    def _keep(self, piece: _Piece) -> None:
        bisect.insort(self._free[piece.small], (piece.size, piece.address, piece))

    def _forget(self, piece: _Piece) -> None:
        pool = self._free[piece.small]
        pool.pop(bisect.bisect_left(pool, (piece.size, piece.address)))

    def _drop(self, piece: _Piece) -> None:
        self._forget(piece)
        self.reserved -= piece.size
        self.addresses.give(piece.address, piece.size)

    def _unmap(self, piece: _Piece) -> None:
        self._forget(piece)
        self.reserved -= piece.size
        self._range_next[piece.small] -= piece.size
        self._range_end[piece.small] = piece.before
        if piece.before is not None:
            piece.before.after = None


@dataclass(frozen=True)
class Replay:
    """What the allocator shows after a trace."""

    requested_peak: int
    allocated_peak: int
    reserved_peak: int
    retries: int
    reserved: Sequence[int]
    """Reserved bytes after each event."""
    states: Mapping[int, Hashable]
    """Of each event that was asked about, what is handed out and free when it comes: the blocks that live,
    in the order of their births, with their addresses, and `Allocator.state`."""


def replay(
    trace: Trace, *, expandable: bool = False, limit: int | None = None, states: Collection[int] = ()
) -> Replay:
    """The trace's requests through the allocator; `states` are events before which it is looked at. Raises
    `OutOfDeviceMemory` when `limit` is too small."""
    allocator = Allocator(expandable=expandable, limit=limit)
    held: dict[int, _Piece] = {}
    reserved: list[int] = []
    blocks = trace.blocks
    moves = _driver_moves(blocks, allocator.addresses)
    seen: dict[int, Hashable] = {}
    for place, event in enumerate(trace.events):
        if place in states:
            living = tuple((blocks[block - 1][:4], piece.address) for block, piece in held.items())
            seen[place] = living, allocator.state()
        if event > 0:
            for move in moves.get(event, ()):
                move()
            held[event] = allocator.allocate(blocks[event - 1].nbytes)
        else:
            allocator.release(held.pop(-event))
        reserved.append(allocator.reserved)
    return Replay(
        allocator.requested_peak,
        allocator.allocated_peak,
        allocator.reserved_peak,
        allocator.retries,
        reserved,
        seen,
    )


def _driver_moves(
    blocks: Sequence[Block], addresses: DeviceAddresses
) -> Mapping[int, Sequence[Callable[[], None]]]:
    """What the driver does with addresses by itself, by the birth before which it does so."""
    ahead = {
        SETTLED: addresses.settle,
        "forward": addresses.begin_forward,
        "backward": addresses.begin_backward,
        CUBLAS_WORKSPACE: addresses.start_cublas,
    }
    found: dict[int, list[Callable[[], None]]] = {}
    due: list[Callable[[], None]] = []
    for number, block in enumerate(blocks, 1):
        due += [ahead.pop(word) for word in (block.phase, block.operator) if word in ahead]
        if due and block.nbytes:
            found[number], due = due, []
            if not ahead:
                break
    return found
