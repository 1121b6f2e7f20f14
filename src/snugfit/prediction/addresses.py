"""Where the CUDA driver puts segments: an order of addresses, and so the order of the allocator's choices.

The caching allocator takes, among free blocks of one size, the one at the lowest address. Which that is, the
driver decides when it hands out segments. No document says how; this is what five recorded runs on one H200
show (driver 580.159.04, torch 2.11, 2026-11-20; 775 segments of 2 to 294 MiB). Replayed with the recorded
addresses, the allocator of `allocator.py` gives every block its recorded address; with the rule below it
reserves what was reserved (`docs/accuracy.md` has the figures).

1. The driver keeps address space in chunks of whole 32 MiB. A segment goes to the lowest hole that it fits
   in, at the hole's lower end.
2. Where none fits, a new chunk is made right below all others, and its upper rest is a hole.
3. The first kernel that is launched, right after the first large tensor, leaves a hole of 416 MiB above all
   chunks; the first segment of the process lies at its upper end.
4. cuBLAS takes 64 MiB of its own from the holes when it starts.

What else the driver and libraries place in between only shifts addresses, and no order changes.
"""

from __future__ import annotations

import bisect

MIB = 1 << 20
CHUNK = 32 * MIB
FIRST_HOLE = 414 * MIB
"""416 MiB less the first segment of 2 MiB at its upper end."""
CUBLAS = 64 * MIB
SMALL_SEGMENT = 2 * MIB


class DeviceAddresses:
    """Hands out addresses of segments in the driver's order."""

    def __init__(self) -> None:
        self._lowest = 1 << 46
        self._holes: list[tuple[int, int]] = []  # (address, size), ascending
        self._taken_large = False

    def take(self, size: int) -> int:
        """The address of a new segment of `size` bytes."""
        address = self._from_hole(size)
        if address is None:
            chunk = -(-size // CHUNK) * CHUNK
            self._lowest -= chunk
            address = self._lowest
            if chunk > size:
                bisect.insort(self._holes, (address + size, chunk - size))
        if size > SMALL_SEGMENT and not self._taken_large:
            self._taken_large = True
            bisect.insort(self._holes, (1 << 46, FIRST_HOLE))
        return address

    def take_for_cublas(self) -> None:
        """What cuBLAS itself takes at its start."""
        self.take(CUBLAS)

    def give(self, address: int, size: int) -> None:
        """A segment that was returned to the driver is a hole again."""
        bisect.insort(self._holes, (address, size))

    def _from_hole(self, size: int) -> int | None:
        for place, (address, space) in enumerate(self._holes):
            if space >= size:
                if space == size:
                    del self._holes[place]
                else:
                    self._holes[place] = (address + size, space - size)
                return address
        return None
