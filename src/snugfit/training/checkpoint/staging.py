"""The host memory for snapshots of a run's state: page-locked memory, allocated once and reused for every
snapshot.

A copy from the device to ordinary memory goes through a buffer of the driver. A copy to page-locked memory is
direct. Locking pages takes time too, so it is done once, in a thread, during the first steps. A state of 4.0
GB was then copied in 0.25 s (results/h200-2026-11-22/train-overhead-waiting.json).

Memory is allocated in chunks whose size is a power of two, because torch's allocator would round other sizes
up. Each tensor in a chunk has its own storage, as safetensors requires.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 256 << 20
"""Smallest size in bytes of one allocation of page-locked memory (chosen): small compared with a model's
state, large compared with a tensor."""

ALIGNED = 256
"""Alignment in bytes of tensors in page-locked memory, the same as of CUDA's own memory."""


class Staging:
    """Host memory for a snapshot's copies of one device's tensors; each `begin` frees all of it."""

    def __init__(self, device: torch.device) -> None:
        self._locks = device.type == "cuda"
        self._chunks: list[torch.Tensor] = []
        self._chunk, self._offset = 0, 0
        self._copies: WeakValueDictionary[Any, torch.Tensor] = WeakValueDictionary()
        self._preparing: threading.Thread | None = None

    def prepare(self, sizes: Iterable[int]) -> None:
        """Allocate memory for tensors of these sizes in bytes, in a thread. No copy may be in use."""
        self.begin()
        if self._locks:
            thread = threading.Thread(target=self._take_all, args=(list(sizes),), name="snugfit-staging")
            self._preparing = thread
            self._preparing.start()

    def begin(self) -> None:
        """Start a new snapshot: its copies overwrite the previous ones."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        self._chunk, self._offset = 0, 0
        self._copies.clear()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to contiguous memory on the host; tensors with shared memory (tied weights) get one
        copy.

        A copy from a GPU is complete after a synchronization with the device.
        """
        key = (tensor.device.type, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        # An empty tensor has no address by which it can be identified.
        copied = self._copies.get(key) if tensor.numel() else None
        if copied is None:
            copied = self._copies[key] = self.copy_passing(tensor)
        return copied

    def copy_passing(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to the host a tensor that will soon be freed. A later tensor at the same address gets its own
        copy.
        """
        import torch

        if not self._locks or tensor.device.type != "cuda" or not tensor.numel():
            return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        buffer = self._free_buffer(tensor.nbytes)
        if buffer is None:
            return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        copied = torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape)
        copied.copy_(tensor.detach(), non_blocking=True)
        return copied

    def _free_buffer(self, size: int) -> memoryview | None:
        """Return `size` bytes of unused page-locked memory; None if the host cannot allocate more."""
        while True:
            if self._chunk == len(self._chunks) and not self._take(size):
                return None
            chunk = self._chunks[self._chunk]
            if self._offset + size <= len(chunk):
                begin, self._offset = self._offset, -(-(self._offset + size) // ALIGNED) * ALIGNED
                return memoryview(chunk.numpy().data)[begin : begin + size]
            self._chunk, self._offset = self._chunk + 1, 0

    def _take(self, size: int) -> bool:
        import torch

        # torch rounds page-locked allocations up to a power of two in any case.
        whole = max(CHUNK_BYTES, 1 << (size - 1).bit_length())
        try:
            self._chunks.append(torch.empty(whole, dtype=torch.uint8, pin_memory=True))
        except RuntimeError:  # no page-locked memory is left: use ordinary memory
            return False
        return True

    def _take_all(self, sizes: list[int]) -> None:
        self._chunk, self._offset = 0, 0
        for size in sizes:
            if self._free_buffer(size) is None:
                return
