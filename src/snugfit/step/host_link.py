"""The host's memory beside a device: its extents, and the observer of copies in a rehearsal."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from snugfit.units import MIB

if TYPE_CHECKING:
    import torch

SLAB_BYTES = 128 << 20
"""Bytes of page-locked memory allocated at once: a power of two, since torch rounds up to one."""

ALIGNMENT = 512
"""Bytes to which extents in it are aligned."""

STAGED_BYTES = 64 << 20
"""Bytes of weights, and of gradients, staged on the host at a time where the host updates them. The number is
chosen: small beside any model, but a copy takes a hundred times as long as its launch.
"""

MANAGED_STEP = 128 * MIB
"""Step, in bytes, in which NVML counts managed memory on the GPU. Source: ten runs with paged optimizers on
two H100s, with 5 MB to 3.6 GB of states. Each differs by at most 4 MiB (results/accuracy-seed2511.json,
accuracy-seed2611.json).
"""


def managed_on_gpu(nbytes: int) -> int:
    """Return NVML's bytes for `nbytes` of managed memory, all of them on the GPU."""
    return -(-nbytes // MANAGED_STEP) * MANAGED_STEP


class Extent(NamedTuple):
    """Some bytes of a slab."""

    slab: int
    start: int
    nbytes: int


class Slabs:
    """Extents in memory that is allocated once. They are handed out in sequence. The sequence restarts when
    all were returned, as they are between two backward passes.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        """Bytes of each slab."""
        self._used = 0
        self._slab = self._end = 0

    def take(self, nbytes: int) -> Extent:
        """So many bytes, in a new slab if need be."""
        while self._slab < len(self.sizes) and self._end + nbytes > self.sizes[self._slab]:
            self._slab, self._end = self._slab + 1, 0
        if self._slab == len(self.sizes):
            self.sizes.append(max(SLAB_BYTES, 1 << (nbytes - 1).bit_length()))
        extent = Extent(self._slab, self._end, nbytes)
        self._end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._used += 1
        return extent

    def give_back(self) -> None:
        """Return an extent to its slab."""
        self._used -= 1
        if not self._used:
            self._slab = self._end = 0


class LinkObserver:
    """Observer of a link on `meta`. The methods here do nothing."""

    def copy_out(self, nbytes: int) -> None:
        """Record a copy of bytes to the host, in order."""

    def copy_back(self, nbytes: int) -> None:
        """Record a copy of bytes to the device, in order."""

    def await_copy(self, later: int) -> None:
        """Record the device's wait for the copy before the last `later` ones."""

    def stage_out(self, nbytes: int) -> None:
        """Record a blocking copy of weights or gradients from the device to the host."""

    def update_on_host(self, nbytes: int, dtype: torch.dtype) -> None:
        """Record the host's wait for the device, and its update of `nbytes` of weights of this dtype."""

    def stage_back(self, nbytes: int) -> None:
        """Record a blocking copy of updated weights from the host to the device."""

    def prefetch(self, nbytes: int) -> None:
        """Record a prefetch of `nbytes` of managed memory."""

    def work_on_host(self, nbytes: int) -> None:
        """Record the host's reads and writes of `nbytes` of weights, gradients or states."""

    def swap(self, nbytes: int) -> None:
        """Record the host's wait for a disk that reads or writes `nbytes` of them."""

    def hold_on_host(self, nbytes: int, pinned: int) -> None:
        """Record `nbytes` of them on the host, of which `pinned` are page-locked."""


class MetaLink:
    """The link of shapes on `meta`, of which only the observer exists."""

    observer: ClassVar[LinkObserver] = LinkObserver()
    """Observer of each copy; a rehearsal sets it."""
