"""Allocations of one of several ranks, whose storages may be resized or used by several streams."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from snugfit.rehearsal.record.allocations import NO_BLOCK, Allocations
from snugfit.rehearsal.trace.trace import DEFAULT_STREAM
from snugfit.results.footprint import Kind


class RankAllocations(Allocations):
    """Record of allocations and frees of the tensors of one simulated rank."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.moment_of: Callable[[int], Iterable[int]] = lambda stream: ()
        """Function that returns a stream's recorded kernels that are not finished, as indices."""
        self.awaited: dict[int, tuple[int, ...]] = {}
        """Kernels of other streams that still use a block when it is freed, by the block's index."""
        self.is_over = False
        """True after the simulated run, so that later frees are not recorded."""
        self._borrowers: defaultdict[int, set[int]] = defaultdict(set)  # other streams that use each block

    def _add_free(self, index: int) -> None:
        if index == NO_BLOCK or self.is_over:
            return
        super()._add_free(index)
        if streams := self._borrowers.pop(index, None):
            awaited = {kernel for stream in streams for kernel in self.moment_of(stream)}
            if awaited:
                self.awaited[index] = tuple(sorted(awaited))

    def resize(self, storage: Any, nbytes: int) -> None:
        """Free the bytes of a storage, or allocate `nbytes` for it; the storage object stays the same.

        FSDP2 stores gathered weights in this way.
        """
        address = storage._cdata
        index, reference = self._live.get(address, (NO_BLOCK, None))
        if index != NO_BLOCK:
            # The storage object stays alive, so that its deletion must not free the block again.
            self._released.add(index)
            self._live[address] = (NO_BLOCK, reference)
            self._add_free(index)
        if nbytes:
            index = self._add_block("aten::resize_", nbytes, Kind.GATHERED)
            self._live[address] = (index, weakref.ref(storage, self._on_free(address, index)))

    def has_seen(self, tensor: torch.Tensor) -> bool:
        """Return True if this tensor's allocation on the device was recorded. Other tensors are still on the
        host.
        """
        return tensor.untyped_storage()._cdata in self._live

    def lend(self, tensor: torch.Tensor, stream: int) -> None:
        """Record that a second stream uses this tensor (`record_stream`).

        The allocator does not reuse its freed block before that stream finishes.
        """
        index, _ = self._live.get(tensor.untyped_storage()._cdata, (NO_BLOCK, None))
        # A use in the block's own stream does not delay its reuse.
        if index != NO_BLOCK and stream != self.streams.get(index, DEFAULT_STREAM):
            self._borrowers[index].add(stream)
