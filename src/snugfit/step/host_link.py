"""Copies between a device and the host's memory, asynchronous to the computation.

On CUDA a separate stream runs them. Page-locked memory is allocated once and used again in each step. A copy
out begins after the device has computed everything launched before it. Memory that a copy back fills belongs
to the computing stream, as every other tensor does. So the allocations and their order do not depend on the
speed of the link, and are the same in every run.

On the CPU a copy is synchronous. On `meta` no bytes are copied, and a rehearsal's observer records each copy.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

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


class Link:
    """Copies between device and host, in order. This base class is the CPU's: its copies are synchronous."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slabs = Slabs()
        self._memory: list[torch.Tensor] = []

    def send(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Extent], Any]:
        """Copy the storages of these tensors to the host; return their extents, and an event to wait for."""
        extents = [self.slabs.take(tensor.untyped_storage().nbytes()) for tensor in tensors]
        return extents, self._send(tensors, extents)

    def fetch(
        self, extents: Sequence[Extent], dtypes: Sequence[torch.dtype]
    ) -> tuple[list[torch.Tensor], Any]:
        """Copy these extents back into new tensors; return the tensors and an event to wait for."""
        import torch

        tensors = [
            torch.empty(extent.nbytes // dtype.itemsize, dtype=dtype, device=self.device)
            for extent, dtype in zip(extents, dtypes, strict=True)
        ]
        return tensors, self._fetch(tensors, extents)

    def wait(self, event: Any) -> None:
        """Make the device wait for this copy."""

    def _send(self, tensors: Sequence[torch.Tensor], extents: Sequence[Extent]) -> Any:
        for tensor, extent in zip(tensors, extents, strict=True):
            self._host(extent).copy_(_bytes_of(tensor), non_blocking=True)

    def _fetch(self, tensors: Sequence[torch.Tensor], extents: Sequence[Extent]) -> Any:
        for tensor, extent in zip(tensors, extents, strict=True):
            _bytes_of(tensor).copy_(self._host(extent), non_blocking=True)

    def _host(self, extent: Extent) -> torch.Tensor:
        """Return the host's bytes at this extent, in slabs that are allocated at their first use."""
        for nbytes in self.slabs.sizes[len(self._memory) :]:
            self._memory.append(self._take(nbytes))
        return self._memory[extent.slab][extent.start : extent.start + extent.nbytes]

    def _take(self, nbytes: int) -> torch.Tensor:
        """Allocate host memory outside of torch's allocator, which represents the device's memory."""
        import torch

        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


class CudaLink(Link):
    """A stream of a GPU that only copies."""

    def __init__(self, device: torch.device) -> None:
        import torch

        super().__init__(device)
        self._stream = torch.cuda.Stream(device)

    def wait(self, event: Any) -> None:
        """Make work that is launched later wait for the copy; the host does not wait."""
        import torch

        torch.cuda.current_stream(self.device).wait_event(event)

    def _send(self, tensors: Sequence[torch.Tensor], extents: Sequence[Extent]) -> Any:
        return self._beside(super()._send, tensors, extents)

    def _fetch(self, tensors: Sequence[torch.Tensor], extents: Sequence[Extent]) -> Any:
        return self._beside(super()._fetch, tensors, extents)

    def _beside(self, copy: Any, tensors: Sequence[torch.Tensor], extents: Sequence[Extent]) -> Any:
        import torch

        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            copy(tensors, extents)
            return self._stream.record_event()

    def _take(self, nbytes: int) -> torch.Tensor:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class MetaLink(Link):
    """Takes extents and copies nothing."""

    observer: ClassVar[LinkObserver] = LinkObserver()
    """Observer of each copy; a rehearsal sets it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._copies = 0

    def wait(self, event: Any) -> None:
        """Wait for a copy; the event is its number."""
        self.observer.await_copy(self._copies - event)

    def _send(self, tensors: Sequence[torch.Tensor], extents: Sequence[Extent]) -> Any:
        return self._count(extents, out=True)

    def _fetch(self, tensors: Sequence[torch.Tensor], extents: Sequence[Extent]) -> Any:
        return self._count(extents, out=False)

    def _count(self, extents: Sequence[Extent], *, out: bool) -> int:
        self._copies += len(extents)
        copy = self.observer.copy_out if out else self.observer.copy_back
        for extent in extents:
            copy(extent.nbytes)
        return self._copies


def link_to_host(device: torch.device) -> Link:
    """Return the link of this kind of device."""
    kinds = {"cuda": CudaLink, "meta": MetaLink}
    return kinds.get(device.type, Link)(device)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor's storage, as bytes."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
