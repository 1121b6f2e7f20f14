"""The allocations and frees of a recorded run, with the category of each block (weight, activation, ...).

The allocation of a storage is the first operator that returns it. Its free is the moment at which the last
reference of Python and autograd disappears (a weak reference's callback).

Blocks of weights, gradients, states, caches and workspaces get their category during the run. All other
blocks get their category at its end.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from snugfit.rehearsal.device.buffers import ONE_OUTPUT, OUTPUTS, Buffer, Scratch
from snugfit.rehearsal.trace.trace import DEFAULT_STREAM, Block, Memory
from snugfit.results.footprint import Kind
from snugfit.step.step import PHASES
from snugfit.techniques.registry import stored_dtype

if TYPE_CHECKING:
    from snugfit.rehearsal.device.policy import Policy
    from snugfit.rehearsal.record.module_tracker import ModuleTracker
    from snugfit.rehearsal.trace.trace import Mark

NO_BLOCK = -1
"""Index of a memory block for a storage that has none, since it has no bytes."""

_ZEROS = "aten::_efficientzerotensor"
"""Operator that creates the zeros of forward-mode autograd. It allocates no memory (`ZeroTensorAllocator`).
"""


class Allocations:
    """A record of when the storages (tensors' memory) of a run are allocated and freed."""

    def __init__(self, policy: Policy, modules: ModuleTracker) -> None:
        self.policy, self.modules = policy, modules
        self.phase, self.step = "build", -1
        """Phase (forward, backward, ...) and step number of the allocations that follow."""
        self.kind_of: Callable[[str, str, str], str] = lambda operator, module, dtype: Kind.TEMPORARIES
        """Function that returns the category of a block without one, in a phase that a feature defines
        (`Step.kind_of`)."""
        self.events: list[int] = []
        """Allocations and frees, in the form of `Trace.events`."""
        self._blocks: list[list[Any]] = []  # the fields of `Block`; the kind is "" until a rule determines it
        self._live: dict[int, tuple[int, Any]] = {}  # storage's address -> block, weak reference
        self._workspaces: dict[tuple[str, str], int] = {}
        self._from = Memory.OWN
        self._of_graphs: set[int] = set()
        self._stream = DEFAULT_STREAM
        self.streams: dict[int, int] = {}
        """CUDA stream of each block by its index, unless it is the default stream."""
        self._played: dict[int, Any] = {}  # storage's address -> weak reference
        self._released: set[int] = set()  # blocks that were freed before their tensors
        self._recomputed: set[int] = set()
        """Indices of blocks that activation checkpointing allocated again in a backward pass."""

    def add_outputs(self, operator: str, out: Any) -> None:
        """Record an allocation for each new storage among an operator's outputs."""
        if isinstance(out, torch.Tensor):
            self._add_tensor(operator, out)
        elif isinstance(out, (list, tuple)):
            # A kernel may allocate its outputs in another order than it returns them. The order determines
            # addresses.
            for item in self.policy.output_alloc_order(operator, out):
                if isinstance(item, torch.Tensor):
                    self._add_tensor(operator, item)
                elif isinstance(item, (list, tuple)):
                    self.add_outputs(operator, item)

    def add_kernel(self, operator: str, out: Any, scratch: Scratch, workspaces: Iterable[Buffer]) -> None:
        """Record the allocations of a kernel: its outputs, its temporary buffers, and workspaces that its
        host thread has not yet allocated.
        """
        # A list with a marker has the outputs between its buffers. Otherwise the outputs come first.
        if not scratch or (OUTPUTS not in scratch and ONE_OUTPUT.keys().isdisjoint(scratch)):
            self.add_outputs(operator, out)
        # On CUDA, autograd runs the backward pass in a separate thread, and cuBLAS has a workspace per
        # thread.
        thread = "backward" if self.phase == "backward" else "main"
        for name, nbytes in workspaces:
            if (name, thread) not in self._workspaces and self._from is not Memory.NOWHERE:
                self._workspaces[name, thread] = self._add_block(name, nbytes, Kind.WORKSPACES)
        buffers: dict[str, int] = {}
        for buffer in scratch:
            name, nbytes = buffer
            if nbytes > 0:
                buffers[name] = self._add_block(f"{operator}: {name}", nbytes, Kind.WORKSPACES)
            # A negative size frees the buffer of this name.
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
            # A storage without bytes requests nothing, so it has no block.
            nbytes = 0 if operator == _ZEROS else storage.nbytes()
            index = self._add_block(operator, nbytes, dtype=_name_of(tensor.dtype)) if nbytes else NO_BLOCK
            if self._from is Memory.NOWHERE:
                # A replayed graph allocates nothing, but its outputs must still be recognized as the graph's.
                self._played[address] = weakref.ref(storage)
            self._live[address] = (index, weakref.ref(storage, self._on_free(address, index)))

    def _add_block(self, operator: str, nbytes: int, kind: str = "", dtype: str = "") -> int:
        if self._from is Memory.NOWHERE:
            return NO_BLOCK
        index = len(self._blocks)
        if self._from is Memory.GRAPHS:
            self._of_graphs.add(index)
        if self._stream != DEFAULT_STREAM:
            self.streams[index] = self._stream
        path = self.modules.path(self.phase)
        self._blocks.append([nbytes, operator, path, self.phase, self.step, kind, dtype])
        # In a backward pass, gradient mode is on only while checkpointing recomputes a part of the forward
        # pass.
        if self.phase == "backward" and torch.is_grad_enabled():
            self._recomputed.add(index)
        # The number starts at 1, so that its sign can mark a free.
        self.events.append(index + 1)
        return index

    def _on_free(self, address: int, index: int) -> Callable[[Any], None]:
        def free(reference: Any) -> None:
            # The address may already belong to a newer storage.
            if self._live.get(address, (None, None))[1] is reference:
                del self._live[address]
            if index not in self._released:
                self._add_free(index)

        return free

    def _add_free(self, index: int) -> None:
        if index != NO_BLOCK:
            self.events.append(-(index + 1))

    def use_stream(self, number: int) -> int:
        """Set the CUDA stream of later allocations, by number. Return the previous one."""
        before, self._stream = self._stream, number
        return before

    # ---- CUDA graphs -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def allocating(self, memory: Memory) -> Iterator[None]:
        """Context in which storages are allocated from this memory, such as the pool of CUDA graphs."""
        before, self._from = self._from, memory
        try:
            yield
        finally:
            self._from = before

    @property
    def of_graphs(self) -> frozenset[int]:
        """Indices of the memory blocks in the pool of CUDA graphs."""
        return frozenset(self._of_graphs)

    def is_of_graphs(self, storage: Any) -> bool:
        """Return True if a storage is in the memory of CUDA graphs, recorded or replayed."""
        address = storage._cdata
        if self._live.get(address, (NO_BLOCK, None))[0] in self._of_graphs:
            return True
        played = self._played.get(address)
        return played is not None and played() is storage

    def built_block(self, storage: Any) -> int | None:
        """Return the memory block of a storage that was allocated before the first step, or None for any
        other.
        """
        index, _ = self._live.get(storage._cdata, (NO_BLOCK, None))
        return index if index != NO_BLOCK and self._blocks[index][4] < 0 else None

    def release_graphs(self) -> None:
        """Record frees of all live blocks in the pool of CUDA graphs, even if tensors still refer to them."""
        for address, (index, reference) in [*self._live.items()]:
            if index in self._of_graphs:
                self._released.add(index)
                # The tensor may still exist: when it is freed later, the block must not be freed again.
                self._live[address] = (NO_BLOCK, reference)
                self._add_free(index)

    def give_workspaces_back(self) -> None:
        """Record frees of the workspaces of all host threads. The next kernel that needs one allocates it
        again.
        """
        for index in self._workspaces.values():
            self._add_free(index)
        self._workspaces.clear()

    def live_bytes(self) -> int:
        """Return the requested bytes of all live memory blocks."""
        sizes = (self._blocks[abs(event) - 1][0] * (1 if event > 0 else -1) for event in self.events)
        return sum(sizes)

    def clear(self) -> None:
        """Delete the recorded allocations and frees of a run, to free memory."""
        self.events.clear()
        self._blocks.clear()
        self._played.clear()

    # ---- kinds of bytes ----------------------------------------------------------------------------------

    def claim(self, tensor: torch.Tensor, kind: str, module: str = "", *, instead_of: str = "") -> None:
        """Set the category (weight, gradient, ...) of this tensor's memory block, and its module if one is
        given.

        Only the first category counts, unless it is `instead_of`, which this call replaces.
        """
        if tensor.device.type != "meta":
            return
        index, _ = self._live.get(tensor.untyped_storage()._cdata, (NO_BLOCK, None))
        if index != NO_BLOCK and self._blocks[index][5] in ("", instead_of):
            # Fields 2, 5 and 6 of `Block` are module, kind and dtype.
            block = self._blocks[index]
            block[2], block[5], block[6] = module or block[2], kind, stored_dtype(tensor)

    def blocks(self, phases: Sequence[Mark]) -> tuple[Block, ...]:
        """Return all memory blocks of the run, with their categories (activation, temporary, ...).

        `phases` are the marks at which phases begin.
        """
        allocated: dict[int, int] = {}
        freed: dict[int, int] = {}
        for position, event in enumerate(self.events):
            (allocated if event > 0 else freed)[abs(event) - 1] = position
        ends = [after.event for before, after in pairwise(phases) if before.phase == "forward"]
        kinds = (
            block[5]
            or (
                self._kind(index, allocated[index], freed.get(index), ends)
                if block[3] in PHASES
                else self.kind_of(block[1], block[2], block[6])
            )
            for index, block in enumerate(self._blocks)
        )
        return tuple(
            Block._make((*block[:5], kind, block[6])) for block, kind in zip(self._blocks, kinds, strict=True)
        )

    def _kind(self, index: int, allocated: int, freed: int | None, forward_ends: Sequence[int]) -> str:
        """Return the category (activation, temporary, ...) of an unlabelled block, from the positions of its
        allocation and free in the events.
        """
        phase = self._blocks[index][3]
        if phase == "load":
            return Kind.INPUTS
        if phase == "build" and freed is None:
            return Kind.WEIGHTS
        if phase == "update" and freed is None:
            return Kind.OPTIMIZER_STATES
        # Recomputed tensors are needed by the backward pass, even if they die with their layer.
        if index in self._recomputed:
            return Kind.ACTIVATIONS
        if phase == "forward":
            at = bisect.bisect_right(forward_ends, allocated)
            # The backward pass needs a block that is still alive at the end of its forward pass.
            if at < len(forward_ends) and (freed is None or freed >= forward_ends[at]):
                return Kind.ACTIVATIONS
        return Kind.TEMPORARIES


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
