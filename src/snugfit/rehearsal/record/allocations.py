"""The allocations and frees of a recorded run, and what its bytes are for.

A storage's allocation is the first operator that returns it; its free is the moment Python's and autograd's
last reference goes (a weak reference's callback). A storage without bytes requests nothing, and is left out.

Weights, gradients, states, caches and workspaces are claimed by name while the run goes on. For the rest the
end of the run decides: what is allocated in the forward pass and still lives when that pass ends was saved
for the backward pass, and is an activation; so is what checkpointing computes again. Everything else is
temporary.
"""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from snugfit.rehearsal.device.buffers import ONE_OUTPUT, OUTPUTS, Buffer, Scratch
from snugfit.rehearsal.trace.trace import DEFAULT_STREAM, Block, Memory
from snugfit.results.footprint import Kind

if TYPE_CHECKING:
    from snugfit.rehearsal.device.policy import Policy
    from snugfit.rehearsal.record.module_tracker import ModuleTracker
    from snugfit.rehearsal.trace.trace import Mark

NO_BLOCK = -1
"""Stands for the block of a storage without bytes."""

_ZEROS = "aten::_efficientzerotensor"
"""Makes the zeros of forward-mode autograd, which no memory is requested for (`ZeroTensorAllocator`)."""


class Allocations:
    """Writes down which storages of a run are allocated and freed."""

    def __init__(self, policy: Policy, modules: ModuleTracker) -> None:
        self.policy, self.modules = policy, modules
        self.phase, self.step = "build", -1
        """Of what is allocated now."""
        self.events: list[int] = []
        """Allocations and frees, as `Trace.events` has them."""
        self._blocks: list[list[Any]] = []  # the fields of `Block`, whose kind is "" until it is claimed
        self._live: dict[int, tuple[int, Any]] = {}  # storage's address -> block, weak reference
        self._workspaces: dict[tuple[str, str], int] = {}
        self._from = Memory.OWN
        self._of_graphs: set[int] = set()
        self._stream = DEFAULT_STREAM
        self.streams: dict[int, int] = {}
        """The stream that each block is of, by its index, where that is not the default one."""
        self.moment_of: Callable[[int], Iterable[int]] = lambda stream: ()
        """The numbers of the kernels that a stream has now to do, as far as they are recorded."""
        self.awaited: dict[int, tuple[int, ...]] = {}
        """Those of streams that had worked on a block when it was freed, by its index."""
        self.is_over = False
        """Whether the run is, so that what is freed now is none of its frees."""
        self._borrowers: defaultdict[int, set[int]] = defaultdict(set)  # other streams by block
        self._played: dict[int, Any] = {}  # storage's address -> weak reference
        self._released: set[int] = set()  # blocks that were freed before their storages
        self._recomputed: set[int] = set()

    def add_outputs(self, operator: str, out: Any) -> None:
        """Allocates the storages of what an operator returned, those that are new."""
        if isinstance(out, torch.Tensor):
            self._add_tensor(operator, out)
        elif isinstance(out, (list, tuple)):
            for item in self.policy.output_alloc_order(operator, out):
                if isinstance(item, torch.Tensor):
                    self._add_tensor(operator, item)
                elif isinstance(item, (list, tuple)):
                    self.add_outputs(operator, item)

    def add_kernel(self, operator: str, out: Any, scratch: Scratch, workspaces: Iterable[Buffer]) -> None:
        """Everything a kernel allocates: its outputs, workspaces when it is its thread's first, scratch."""
        if not scratch or (OUTPUTS not in scratch and ONE_OUTPUT.keys().isdisjoint(scratch)):
            self.add_outputs(operator, out)
        thread = "backward" if self.phase == "backward" else "main"
        for name, nbytes in workspaces:
            if (name, thread) not in self._workspaces and self._from is not Memory.NOWHERE:
                self._workspaces[name, thread] = self._add_block(name, nbytes, Kind.WORKSPACES)
        buffers: dict[str, int] = {}
        for buffer in scratch:
            name, nbytes = buffer
            if nbytes > 0:
                buffers[name] = self._add_block(f"{operator}: {name}", nbytes, Kind.WORKSPACES)
            elif nbytes < 0:
                self._add_free(buffers.pop(name))
            elif buffer == OUTPUTS:
                self.add_outputs(operator, out)
            elif buffer in ONE_OUTPUT:
                self.add_outputs(operator, out[ONE_OUTPUT[buffer]])

    def _add_tensor(self, operator: str, tensor: torch.Tensor) -> None:
        if not tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._live:
            nbytes = 0 if operator == _ZEROS else storage.nbytes()
            index = self._add_block(operator, nbytes) if nbytes else NO_BLOCK
            if self._from is Memory.NOWHERE:
                self._played[address] = weakref.ref(storage)
            self._live[address] = (index, weakref.ref(storage, self._on_free(address, index)))

    def _add_block(self, operator: str, nbytes: int, kind: str = "") -> int:
        if self._from is Memory.NOWHERE:
            return NO_BLOCK
        index = len(self._blocks)
        if self._from is Memory.GRAPHS:
            self._of_graphs.add(index)
        if self._stream != DEFAULT_STREAM:
            self.streams[index] = self._stream
        self._blocks.append([nbytes, operator, self.modules.path(self.phase), self.phase, self.step, kind])
        if self.phase == "backward" and torch.is_grad_enabled():
            self._recomputed.add(index)
        self.events.append(index + 1)
        return index

    def _on_free(self, address: int, index: int) -> Callable[[Any], None]:
        def free(reference: Any) -> None:
            if self._live.get(address, (None, None))[1] is reference:
                del self._live[address]
            if index not in self._released:
                self._add_free(index)

        return free

    def _add_free(self, index: int) -> None:
        if index == NO_BLOCK or self.is_over:
            return
        self.events.append(-(index + 1))
        if streams := self._borrowers.pop(index, None):
            awaited = {kernel for stream in streams for kernel in self.moment_of(stream)}
            if awaited:
                self.awaited[index] = tuple(sorted(awaited))

    # ---- streams, and storages that are kept without bytes -----------------------------------------------

    def use_stream(self, number: int) -> int:
        """What is allocated from here on is of this stream; gives the one before it."""
        before, self._stream = self._stream, number
        return before

    def resize(self, storage: Any, nbytes: int) -> None:
        """A storage gives its bytes back, or takes so many, and stays the same storage: so FSDP2 keeps
        gathered weights."""
        address = storage._cdata
        index, reference = self._live.get(address, (NO_BLOCK, None))
        if index != NO_BLOCK:
            self._released.add(index)
            self._live[address] = (NO_BLOCK, reference)
            self._add_free(index)
        if nbytes:
            index = self._add_block("aten::resize_", nbytes, Kind.GATHERED)
            self._live[address] = (index, weakref.ref(storage, self._on_free(address, index)))

    def has_seen(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of the device. What was built out of sight is the host's still."""
        return tensor.untyped_storage()._cdata in self._live

    def lend(self, tensor: torch.Tensor, stream: int) -> None:
        """Another stream than its own works on this tensor, too (`record_stream`): the allocator keeps its
        block, once it is freed, until that is done."""
        index, _ = self._live.get(tensor.untyped_storage()._cdata, (NO_BLOCK, None))
        if index != NO_BLOCK and stream != self.streams.get(index, DEFAULT_STREAM):
            self._borrowers[index].add(stream)

    # ---- CUDA graphs -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def allocating(self, where: Memory) -> Iterator[None]:
        """Within it, what is allocated is allocated there."""
        before, self._from = self._from, where
        try:
            yield
        finally:
            self._from = before

    @property
    def of_graphs(self) -> frozenset[int]:
        """The blocks that are in the memory of CUDA graphs."""
        return frozenset(self._of_graphs)

    def is_of_graphs(self, storage: Any) -> bool:
        """Whether a storage is in the memory of CUDA graphs, recorded or played back."""
        address = storage._cdata
        if self._live.get(address, (NO_BLOCK, None))[0] in self._of_graphs:
            return True
        played = self._played.get(address)
        return played is not None and played() is storage

    def built_block(self, storage: Any) -> int | None:
        """The block of a storage that was made before the first step; None of any other."""
        index, _ = self._live.get(storage._cdata, (NO_BLOCK, None))
        return index if index != NO_BLOCK and self._blocks[index][4] < 0 else None

    def release_graphs(self) -> None:
        """Frees what lives in the pool of CUDA graphs, though tensors may still refer to it."""
        for address, (index, reference) in [*self._live.items()]:
            if index in self._of_graphs:
                self._released.add(index)
                self._live[address] = (NO_BLOCK, reference)
                self._add_free(index)

    def give_workspaces_back(self) -> None:
        """Frees the workspaces that threads keep: whoever next needs one takes one anew."""
        for index in self._workspaces.values():
            self._add_free(index)
        self._workspaces.clear()

    def live_bytes(self) -> int:
        """Requested bytes of what was allocated and not freed."""
        sizes = (self._blocks[abs(event) - 1][0] * (1 if event > 0 else -1) for event in self.events)
        return sum(sizes)

    def forget(self) -> None:
        """Lets go of what was written down."""
        self.events.clear()
        self._blocks.clear()
        self._played.clear()

    # ---- what for ----------------------------------------------------------------------------------------

    def claim(self, tensor: torch.Tensor, kind: str, module: str = "", *, instead_of: str = "") -> None:
        """This tensor's bytes are of this kind, and of this module where one is named; the first claim
        counts, unless it was for the kind that this one stands `instead_of`."""
        if tensor.device.type != "meta":
            return
        index, _ = self._live.get(tensor.untyped_storage()._cdata, (NO_BLOCK, None))
        if index != NO_BLOCK and self._blocks[index][5] in ("", instead_of):
            block = self._blocks[index]
            block[2], block[5] = module or block[2], kind

    def blocks(self, phases: Sequence[Mark]) -> tuple[Block, ...]:
        """All blocks, with the kinds that only the end of a run shows; `phases` are where phases begin."""
        allocated: dict[int, int] = {}
        freed: dict[int, int] = {}
        for position, event in enumerate(self.events):
            (allocated if event > 0 else freed)[abs(event) - 1] = position
        ends = [after.event for before, after in pairwise(phases) if before.phase == "forward"]
        return tuple(
            Block._make((*block[:5], block[5] or self._kind(index, allocated[index], freed.get(index), ends)))
            for index, block in enumerate(self._blocks)
        )

    def _kind(self, index: int, allocated: int, freed: int | None, forward_ends: Sequence[int]) -> str:
        """The kind of a block that was not claimed, by the events that allocate and free it."""
        phase = self._blocks[index][3]
        if phase == "load":
            return Kind.INPUTS
        if phase == "build" and freed is None:
            return Kind.WEIGHTS
        if phase == "update" and freed is None:
            return Kind.OPTIMIZER_STATES
        if index in self._recomputed:
            return Kind.ACTIVATIONS
        if phase == "forward":
            at = bisect.bisect_right(forward_ends, allocated)
            if at < len(forward_ends) and (freed is None or freed >= forward_ends[at]):
                return Kind.ACTIVATIONS
        return Kind.TEMPORARIES
