"""Copies between a device and the host's memory, which run beside the computation.

On CUDA a separate stream runs them. Page-locked memory is allocated once and used again in each step. A copy
out begins after the device has computed everything launched before it. Memory that a copy back fills belongs
to the computing stream, as every other tensor does. So the allocations and their order do not depend on the
speed of the link, and are the same in every run.

On the CPU a copy is synchronous. On `meta` no bytes are copied, and a simulation's observer records each
copy.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from snugfit.step.host_link import Extent, MetaLink, Slabs

if TYPE_CHECKING:
    import torch


class Link:
    """Copies between a device and host memory, in order. This base class is for the CPU, and its copies are
    synchronous.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slabs = Slabs()
        self._memory: list[torch.Tensor] = []

    def send(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Extent], Any]:
        """Start copies of these tensors' storages to the host. Return their positions in the host buffers,
        and an event to wait for.
        """
        extents = [self.slabs.take(tensor.untyped_storage().nbytes()) for tensor in tensors]
        return extents, self._send(tensors, extents)

    def fetch(
        self, extents: Sequence[Extent], dtypes: Sequence[torch.dtype]
    ) -> tuple[list[torch.Tensor], Any]:
        """Start copies from these positions in the host buffers into new device tensors. Return the tensors
        and an event to wait for.
        """
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
        """Return the host bytes at this position as a tensor; host buffers are allocated at their first
        use.
        """
        for nbytes in self.slabs.sizes[len(self._memory) :]:
            self._memory.append(self._take(nbytes))
        return self._memory[extent.slab][extent.start : extent.start + extent.nbytes]

    def _take(self, nbytes: int) -> torch.Tensor:
        """Return newly allocated host memory. The memory does not come from torch's allocator, because a
        simulation observes that.
        """
        import torch

        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


class CudaLink(Link):
    """Copies between a CUDA device and host memory, on a CUDA stream that does nothing else."""

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


class ObservedLink(Link):
    """Simulated copies for tensors on `meta`: host addresses are assigned, an observer is notified, and
    nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._copies = 0

    def wait(self, event: Any) -> None:
        """Record a wait for the copy with this number."""
        MetaLink.observer.await_copy(self._copies - event)

    def _send(self, tensors: Sequence[torch.Tensor], extents: Sequence[Extent]) -> Any:
        return self._count(extents, out=True)

    def _fetch(self, tensors: Sequence[torch.Tensor], extents: Sequence[Extent]) -> Any:
        return self._count(extents, out=False)

    def _count(self, extents: Sequence[Extent], *, out: bool) -> int:
        self._copies += len(extents)
        copy = MetaLink.observer.copy_out if out else MetaLink.observer.copy_back
        for extent in extents:
            copy(extent.nbytes)
        return self._copies


def link_to_host(device: torch.device) -> Link:
    """Return the object that copies between this device type (CUDA, CPU, `meta`) and the host."""
    kinds = {"cuda": CudaLink, "meta": ObservedLink}
    return kinds.get(device.type, Link)(device)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of a tensor's storage as a tensor."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
