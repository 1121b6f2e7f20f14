"""Where the CUDA driver puts segments: an order of addresses, and so the order of the allocator's choices.

The caching allocator takes, among free blocks of one size, the one at the lowest address. Which that is, the
driver decides when it hands out segments. No document says how; this is what nine recorded runs on H200s show
(driver 580.159.04, torch 2.11, 2026-11-20 and -22), and where single operators leave their marks
(`results/h200-2026-11-22/holes.json`). Replayed with the recorded addresses, the allocator of `allocator.py`
gives every block its recorded address; with the rule below it reserves and hands out what was recorded in all
nine, and makes the same choice at every block in five.

1. The driver keeps address space in chunks of whole 32 MiB. A segment goes to the lowest hole that it fits
   in, at the hole's lower end.
2. Where none fits, a new chunk is made right below all others, and its upper rest is a hole.
3. From the start there is one chunk of 416 MiB, above all that are to come, of which the context holds the
   lower 414, and 64 MiB higher one of 32, of which it holds the lower 8.
4. The context lets its 414 MiB go before the first kernel of most kinds (`rehearsal/device/context.py`). If a
   segment lies in the 2 MiB above them, that is a hole. If not, the chunk is gone, and new chunks are made in
   its place, from its upper end downwards, until the libraries that cuBLAS loads lie there.
5. The code of kernels takes 2 MiB at a time from the holes: once before that first kernel, twice when the
   first forward pass begins, five times when the first backward pass does. Two ViTs show it so; a BERT took
   as much, but before its backward pass.
6. cuBLAS takes 64 MiB of its own from the holes when it starts.

What else the driver and libraries place in between only shifts addresses, and no order changes.
"""

from __future__ import annotations

import bisect

MIB = 1 << 20
CHUNK = 32 * MIB
TOP = 1 << 46
"""Where the context's own chunk begins; all later ones lie below, but for those in its place."""
OWN_CHUNK, OWN = 416 * MIB, 414 * MIB
"""The context's own chunk, and what it holds of that."""
ABOVE_OWN = (TOP + OWN, OWN_CHUNK - OWN)
HIGHEST = (TOP + 488 * MIB, 24 * MIB)
"""Holes from the start: addresses, which matter as an order, and sizes."""
CODE, FORWARD_CODE, BACKWARD_CODE = 2 * MIB, 2, 5
"""How much address space the code of kernels takes at a time, and how often when passes first begin."""
CUBLAS = 64 * MIB


class DeviceAddresses:
    """Hands out addresses of segments in the driver's order."""

    def __init__(self) -> None:
        self._lowest = TOP
        self._holes = [ABOVE_OWN, HIGHEST]  # (address, size), ascending
        self._room = 0  # of the place of the context's own chunk, what is left for new ones

    def take(self, size: int) -> int:
        """The address of a new segment of `size` bytes."""
        return self._placed(size)

    def settle(self) -> None:
        """The context lets go of what it held."""
        self._placed(CODE)
        if ABOVE_OWN in self._holes:
            self._holes.remove(ABOVE_OWN)
            self._room = OWN_CHUNK
        else:
            bisect.insort(self._holes, (TOP, OWN))

    def begin_forward(self) -> None:
        """The first forward pass loads its kernels."""
        for _ in range(FORWARD_CODE):
            self._placed(CODE)

    def begin_backward(self) -> None:
        """So does the first backward pass."""
        for _ in range(BACKWARD_CODE):
            self._placed(CODE)

    def start_cublas(self) -> None:
        """cuBLAS takes what it needs for itself, and its libraries lie where there was room."""
        self._placed(CUBLAS)
        self._room = 0

    def give(self, address: int, size: int) -> None:
        """A segment that was returned to the driver is a hole again."""
        bisect.insort(self._holes, (address, size))

    def _placed(self, size: int) -> int:
        address = self._from_hole(size)
        if address is None:
            chunk = -(-size // CHUNK) * CHUNK
            address = self._new_chunk(chunk)
            if chunk > size:
                bisect.insort(self._holes, (address + size, chunk - size))
        return address

    def _from_hole(self, size: int) -> int | None:
        for place, (address, space) in enumerate(self._holes):
            if space >= size:
                if space == size:
                    del self._holes[place]
                else:
                    self._holes[place] = (address + size, space - size)
                return address
        return None

    def _new_chunk(self, chunk: int) -> int:
        if chunk <= self._room:
            self._room -= chunk
            return TOP + self._room
        self._lowest -= chunk
        return self._lowest
