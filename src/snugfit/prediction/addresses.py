"""Simulate the addresses at which the CUDA driver maps new segments of GPU memory. Their order decides which
free block the caching allocator reuses.

The caching allocator takes, among free blocks of one size, the one at the lowest address. The driver decides
that order when it maps segments. The order is not documented. These rules are inferred from nine recorded
runs on H200s (driver 580.159.04, torch 2.11, 2026-11-20 and -22). Further evidence is single operators
(`results/h200-2026-11-22/holes.json`), and runs on an H100 (2026-11-26) where a rule names them. Replayed
with the recorded addresses, the allocator of `allocator.py` gives every block its recorded address. With
these rules, its reserved and allocated bytes equal the recorded ones in all nine runs. In five of them it
makes the same choice at every block.

Other mappings of the driver and of libraries only shift addresses and change no order.
"""

from __future__ import annotations

import bisect

MIB = 1 << 20
# The driver divides address space into chunks of whole 32 MiB.
CHUNK = 32 * MIB
TOP = 1 << 46
"""Address of the CUDA context's own chunk. All later segments are below it, except those in the chunk
itself."""
# From the start there is one chunk of 416 MiB above all later ones; the context occupies its lower 414 MiB.
OWN_CHUNK, OWN, LOWEST = 416 * MIB, 414 * MIB, 32 * MIB
"""Sizes in bytes: the CUDA context's own chunk, its occupied part, and the part that stays empty after the
chunk's release."""
ABOVE_OWN = (TOP + OWN, OWN_CHUNK - OWN)
# Another chunk of 32 MiB is 64 MiB higher. The context occupies its lower 8 MiB.
HIGHEST = (TOP + 488 * MIB, 24 * MIB)
"""Free ranges of addresses before the first allocation: (address, size in bytes). Only the order of the
addresses matters."""
# Two ViTs show these counts. A BERT took as much, but before its backward pass.
CODE, FORWARD_CODE, BACKWARD_CODE = 2 * MIB, 2, 5
"""Bytes of address space that one load of kernel code takes. The counts are the loads in the first forward
and backward pass."""
# A hole of 52 MiB was full then in a run on an H100 (a Whisper, 2026-11-26).
CUBLAS, LIBRARIES = 64 * MIB, 192 * MIB
"""Bytes of address space that cuBLAS takes at its first use, and those of the libraries that it loads.
Libraries take it in units of `CODE`."""


class DeviceAddresses:
    """A model of the CUDA driver that gives new segments their addresses."""

    def __init__(self) -> None:
        self._lowest = TOP
        self._holes = [ABOVE_OWN, HIGHEST]  # (address, size), ascending
        self._room = 0  # bytes left for new chunks where the context's own chunk was, above the lowest

    def map_segment(self, size: int) -> int:
        """Return the address of a new segment of `size` bytes."""
        return self._reserve_space(size)

    def release_context(self) -> None:
        """Free the part of the CUDA context's memory chunk that later segments may use."""
        # The code of the first kernels takes its space before the context gives up its own.
        self._reserve_space(CODE)
        # No segment is in the 2 MiB above, so the whole chunk is gone, and new chunks are made in its place.
        if ABOVE_OWN in self._holes:
            self._holes.remove(ABOVE_OWN)
            # Two runs on an H100 left the lowest 32 MiB of the place empty.
            self._room = OWN_CHUNK - LOWEST
        else:
            # A segment keeps the chunk, and the released 414 MiB are a hole below it.
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
        # cuBLAS takes its space from the holes, 2 MiB at a time.
        for _ in range(CUBLAS // CODE):
            self._reserve_space(CODE)
        # Another run on an H100 shows the amount, with three new chunks below it.
        self._room = max(0, self._room - LIBRARIES)

    def _reserve_space(self, size: int) -> int:
        address = self._from_hole(size)
        if address is None:
            chunk = -(-size // CHUNK) * CHUNK
            # If no hole is large enough, a new chunk is made right below all others, and its upper rest is a
            # hole.
            address = self._new_chunk(chunk)
            if chunk > size:
                bisect.insort(self._holes, (address + size, chunk - size))
        return address

    def _from_hole(self, size: int) -> int | None:
        # A segment goes to the lowest hole that it fits in, at the hole's lower end.
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
            # New chunks fill the context's former place downwards.
            return TOP + LOWEST + self._room
        self._lowest -= chunk
        return self._lowest
