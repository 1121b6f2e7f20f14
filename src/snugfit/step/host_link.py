"""Page-locked host memory for copies of a device's tensors, and the interface that reports simulated
copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from snugfit.units import MIB

if TYPE_CHECKING:
    import torch

SLAB_BYTES = 128 << 20
"""Bytes of page-locked host memory in one allocation (slab). They are a power of two, since torch rounds up
to one.
"""

ALIGNMENT = 512
"""Bytes to a multiple of which the start of each extent in a slab is aligned."""

STAGED_BYTES = 64 << 20
"""Bytes of weights, and of gradients, that are copied to the host at a time if the host updates them
(chosen). They are few compared with a model. Their copy takes a hundred times as long as its launch.
"""

MANAGED_STEP = 128 * MIB
"""Granularity in bytes with which NVML counts managed memory on the GPU. Source: ten runs with paged
optimizers on two H100s, with 5 MB to 3.6 GB of states. Each run differs from the computed bytes by at most 4
MiB (results/accuracy-seed2511.json, accuracy-seed2611.json).
"""


def managed_on_gpu(nbytes: int) -> int:
    """Return the bytes that NVML counts for `nbytes` of CUDA managed memory, all of them on the GPU."""
    return -(-nbytes // MANAGED_STEP) * MANAGED_STEP


class Extent(NamedTuple):
    """A range of bytes in a large block of page-locked host memory."""

    slab: int
    start: int
    nbytes: int


class Slabs:
    """A bump allocator of page-locked host memory in large blocks (slabs). It returns consecutive ranges of
    slabs, which stay allocated. It starts again at the first slab once all ranges are released, as between
    two backward passes.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        """Bytes of each slab."""
        self._used = 0
        self._slab = self._end = 0

    def take(self, nbytes: int) -> Extent:
        """Return a range of `nbytes` bytes in host memory; allocate another slab if no slab has enough free
        bytes.
        """
        while self._slab < len(self.sizes) and self._end + nbytes > self.sizes[self._slab]:
            self._slab, self._end = self._slab + 1, 0
        if self._slab == len(self.sizes):
            self.sizes.append(max(SLAB_BYTES, 1 << (nbytes - 1).bit_length()))
        extent = Extent(self._slab, self._end, nbytes)
        self._end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._used += 1
        return extent

    def give_back(self) -> None:
        """Release a range of page-locked memory; after the last one, allocation starts over at the first
        slab.
        """
        self._used -= 1
        if not self._used:
            self._slab = self._end = 0


class LinkObserver:
    """Base class for recorders of copies between a device and the host. The methods of this class
    do nothing.
    """

    def copy_out(self, nbytes: int) -> None:
        """Record a copy of bytes from the device to the host, in order."""

    def copy_back(self, nbytes: int) -> None:
        """Record a copy of bytes from the host to the device, in order."""

    def await_copy(self, later: int) -> None:
        """Record that the device waits for a copy: the one that precedes the last `later` copies."""

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
        """Record the host's wait for a disk to read or write `nbytes` of weights, gradients or states."""

    def hold_on_host(self, nbytes: int, pinned: int) -> None:
        """Record `nbytes` of weights, gradients or states in host memory, of which `pinned` are
        page-locked."""


class MetaLink:
    """The copies between host and device in a simulation on `meta`: each is passed to an observer, and no
    data moves."""

    observer: ClassVar[LinkObserver] = LinkObserver()
    """Observer that receives each copy between GPU and host. A simulation sets it."""
