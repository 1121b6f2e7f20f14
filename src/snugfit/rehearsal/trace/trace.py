"""The trace: every allocation, free and kernel of a recorded run, in order, each with its origin.

A trace is plain data. `blocks` are the allocations, in order. `events` contains allocations and frees: `i +
1` allocates block `i`, and `-(i + 1)` frees it. Blocks that outlive the run (weights, states) are never
freed. `marks` are positions between two events, such as the start of a phase. All predicted bytes follow from
these three lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

COPY_IN = "Memcpy HtoD"
"""Name of a kernel that copies from host memory, as in CUDA's profiler."""

GENERATED = "generated::"
"""Prefix for the name of a kernel that a compiler generated."""

PREPARED = "Memcpy HtoD, prepared"
"""Name of the copy of a batch from page-locked host memory, which `Kernel.tensors` worker processes prepared.
"""


COPY_OUT = "Memcpy DtoH, activations"
"""Name of a copy of activations to page-locked host memory, in a CUDA stream for copies only."""

COPY_BACK = "Memcpy HtoD, activations"
"""Name of a copy of activations back to the device."""

AWAIT_COPY = "cudaStreamWaitEvent"
"""Name of an entry for a wait of the compute stream until a copy of activations has finished.
`Kernel.tensors` copies are queued after that copy."""

PREFETCH = "cudaMemPrefetchAsync"
"""Name of an entry for a prefetch: the host requests pages of managed memory before the device needs them."""

COPIES = frozenset({COPY_OUT, COPY_BACK})
"""Names of copies of activations, which run in parallel to the computation, one after the other."""

STAGE_OUT = "Memcpy DtoH, update"
"""Name of a copy of weights or gradients to page-locked host memory, in the computing stream."""

UPDATE_ON_HOST = "AdamW on the host"
"""Name of an entry for the update of weights by the host, after it waits for the device."""

STAGE_BACK = "Memcpy HtoD, update"
"""Name of a copy of updated weights to the device, in the computing stream."""

WORK_ON_HOST = "pass of the host"
"""Name of an entry for reads and writes of weights, gradients or optimizer states by the host itself."""

SWAPPED = "swap with the disk"
"""Name of an entry for a wait of the host while a disk reads or writes weights, gradients or optimizer
states."""

HELD_ON_HOST = "memory of the host"
"""Name of an entry without work, which reports the bytes of weights, gradients and states in host memory."""

PINNED_ON_HOST = "page-locked on the host"
"""Name of an entry without work, which reports the page-locked bytes among those of `HELD_ON_HOST`."""

SHARD_HOOKS = "hooks of sharded weights"
"""Name of an entry for `Kernel.tensors` of FSDP2's hooks, which the host runs in Python.

They gather, free and reduce-scatter the weights and gradients of a group.
"""

SHARDED_OPERANDS = "operands in shards"
"""Name of an entry for the inspection of sharded operands (DTensor) in Python, before an operator runs on the
shards.

`Kernel.tensors` is the number of these tensors.
"""

PART_OPERATORS = "operators on parts of tensors"
"""Name of an entry for `Kernel.tensors` operators of DTensor, whose output sharding the host computes in
Python."""

WEIGHTS_APART = "gradients of weights apart"
"""Name of an entry for `Kernel.tensors` weights whose gradients a pipeline computes separately from those of
inputs.

For each, torch traverses the autograd graph in Python.
"""

BY_HOST = frozenset(
    {
        SHARD_HOOKS,
        SHARDED_OPERANDS,
        PART_OPERATORS,
        WEIGHTS_APART,
        UPDATE_ON_HOST,
        WORK_ON_HOST,
        SWAPPED,
        HELD_ON_HOST,
        PINNED_ON_HOST,
    }
)
"""Names of entries whose work the host does, and not the device."""

STAGED = frozenset({STAGE_OUT, STAGE_BACK})
"""Names of copies of weights and gradients in the computing stream."""

TRITON = "triton::"
"""Prefix for the name of a Triton kernel that a library launches from Python."""


ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "nccl::all_reduce", "nccl::all_gather", "nccl::reduce_scatter"
ALL_TO_ALL, BROADCAST, SEND, RECEIVE = "nccl::all_to_all", "nccl::broadcast", "nccl::send", "nccl::recv"
COLLECTIVES = frozenset({ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, SEND, RECEIVE})
"""Names of kernels that exchange tensors between GPUs. `Kernel.nbytes` is the size of the whole tensor that
is gathered or scattered, as in NCCL's tests."""

ALONE = (1, 0)
"""Value of `Kernel.peers` for a kernel that does not communicate."""

WITH_BIAS = frozenset({"aten::addmm", "aten::baddbmm", "aten::addmm_", "aten::baddbmm_"})
"""Names of matrix products that add their first operand."""

MATRIX_PRODUCTS = WITH_BIAS | {"aten::mm", "aten::bmm", "aten::_grouped_mm", "aten::_scaled_mm"}

CASTS, STRIDED, TRANSPOSED, WITH_DROPOUT = "casts", "strided", "transposed", "with dropout"
"""Values of `Kernel.layout` for kernels of torch's own operators."""

POINTWISE, REDUCTION = "generated pointwise", "generated reduction"
WITH_FUNCTIONS, WITH_RANDOM = "generated with functions", "generated with random numbers"
"""Values of `Kernel.layout` for a kernel that a compiler generated.

Kernels `with functions` call `erf` or `tanh`; those `with random numbers` draw random numbers. Both take
longer than their memory traffic.
"""


class Block(NamedTuple):
    """One memory block of a run, of at least one byte, from its allocation to its free."""

    nbytes: int
    """Bytes that the program requested, before the allocator rounds them."""
    operator: str
    """Name of the torch operator that requested the block (`aten::addmm`), or the block's purpose (`cuBLAS
    workspace`)."""
    module: str
    """Dotted name of the module whose code requested the block."""
    phase: str
    step: int
    """Number of the optimizer step, from 0; -1 before the first."""
    kind: str
    """Category of the block's bytes (a `Kind`: weights, activations, ...), determined at the end of the
    run."""
    dtype: str = ""
    """Name of torch's dtype, or of packed numbers, such as `nf4`; empty for temporary buffers of kernels."""


DEFAULT_STREAM, GRAPH_STREAM = 0, -1
"""Numbers of the compute stream (CUDA's default) and of the stream on which CUDA graphs are recorded.

Other streams count from 1, in the order of their creation.
"""

GENERATOR_BYTES = 8
"""Size in bytes of the seed, and of the offset, of a random generator that CUDA graphs use on the device.

The source is `c10::CUDAGeneratorState::register_graph`.
"""


class Memory(Enum):
    """The place where a run allocates a block, such as the pool of CUDA graphs."""

    OWN = auto()
    """The allocator's own pools of the current stream."""
    GRAPHS = auto()
    """The pool of CUDA graphs."""
    NOWHERE = auto()
    """Nothing is allocated: outputs of a replayed graph have the addresses of its recording."""


class MarkKind(StrEnum):
    """Types of marks in a trace, such as the end of a step."""

    PHASE = "phase"
    """A phase of a step begins."""
    CONTEXT_RELEASED = "context released"
    """The driver releases the address space that it reserved with the context. This occurs once in a run."""
    CACHE_EMPTIED = "cache emptied"
    """The allocator releases its cached memory (`torch.cuda.empty_cache`)."""
    KERNEL = "kernel"
    """The next kernel of the last step runs."""
    WAIT = "wait"
    """The host waits for the device."""
    STEP_END = "step end"
    """An optimizer step ends."""


class Mark(NamedTuple):
    """A moment of a run between two allocations or frees, such as the start of a phase."""

    event: int
    """Number of allocations and frees before the mark."""
    step: int
    """Number of the optimizer step, from 0; -1 before the first."""
    phase: str
    """The current phase, or the one that begins."""
    kind: MarkKind = MarkKind.PHASE


class Kernel(NamedTuple):
    """One kernel of the last step: an operator that runs on the device."""

    operator: str
    module: str
    phase: str
    flops: int
    nbytes: int
    """Bytes that the kernel reads and writes."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the first three tensor inputs."""
    dtype: str
    """Dtype of the first input; `tf32` for a product of fp32 tensors that is computed in TF32."""
    tensors: int
    """Number of input tensors; for foreach optimizers, the tensors in their lists."""
    layout: str = ""
    """Property of the operands that changes the kernel's speed, besides their sizes.

    For a pointwise operator or a copy: `strided` for operands with different strides, `casts` for mixed
    precisions. `transposed` means that an operand larger than any cache is read across its rows. For
    attention: `with dropout`. For a kernel that a compiler generated: its speed class (`POINTWISE` and the
    constants after it).
    """
    leading: tuple[int, ...] = ()
    """Leading dimensions of a matrix product's operands, as in BLAS: the strides in elements between rows."""
    recomputed: bool = False
    """True for a forward operator that runs again in the backward pass."""
    modules: int = 0
    """Number of active modules that launched no kernel before this one."""
    views: int = 0
    """Number of operators without a kernel since the last kernel: views, and empty tensors."""
    checkpoints: int = 0
    """Number of checkpointed regions that began since the last kernel, or whose recomputation began."""
    intercepted: int = 0
    """Number of operators since the last kernel that selective checkpointing intercepted in Python."""
    compiled: bool = False
    """True if compiled code (`torch.compile`) launches the kernel."""
    programs: int = 0
    """Number of calls of compiled code that began since the last kernel."""
    functions: int = 0
    """Number of libraries' autograd Functions, in Python, that began since the last kernel."""
    played: bool = False
    """True if the kernel is part of a CUDA graph, which the host launches as a whole."""
    stream: int = DEFAULT_STREAM
    """Number of the kernel's CUDA stream, which runs in parallel to other streams."""
    after: tuple[int, ...] = ()
    """Indices of the kernels in other streams that must finish before this one."""
    peers: tuple[int, int] = ALONE
    """Number of GPUs that exchange tensors in this collective, and the distance between their ranks.

    For a send or receive, the distance to the other rank, negative for a lower rank.
    """

    @property
    def itemsize(self) -> int:
        """Size in bytes of an element of the first input, for a dtype of matrix products."""
        # Products in 8 bits are float8; every other narrow dtype has "16" in its name.
        return 1 if "float8" in self.dtype else 2 if "16" in self.dtype else 4


class Work(NamedTuple):
    """The kernels of a part of a step, such as its optimizer update, and the host's waits among them."""

    kernels: tuple[Kernel, ...] = ()
    waits: tuple[int, ...] = ()
    """Indices of the kernels before which the host waits, ascending."""


class Period(NamedTuple):
    """A part of a trace that repeats the same allocations and frees, with other block numbers."""

    start: int
    """Number of events (allocations and frees) before the first repetition."""
    events: int
    """Number of events in one repetition."""
    blocks: int
    """Number of blocks that one repetition allocates, by which block numbers increase each time."""
    times: int


class Peak(NamedTuple):
    """The moment of a run with the most requested bytes alive."""

    nbytes: int
    """Bytes requested at the peak, before the allocator rounds them."""
    position: int
    """Index of the event after which the peak is first reached; -1 without allocations."""


@dataclass(frozen=True)
class Trace:
    """The allocations and frees of a run of some optimizer steps on a device, and the kernels of its last
    step."""

    blocks: tuple[Block, ...]
    """Allocations of the run, in order."""
    events: tuple[int, ...]
    """Allocations (`i + 1`) and frees (`-(i + 1)`) of block `i`."""
    marks: tuple[Mark, ...]
    """Starts of phases, releases of the context and emptied caches, in order."""
    kernels: tuple[Kernel, ...]
    """Kernels of the last step only, which all later steps would repeat."""
    waits: tuple[int, ...]
    """Indices, in the last step, of the kernels before which the host waits for the device."""
    attention: tuple[str, ...]
    """Names of the attention kernels that the run uses."""
    doubts: tuple[str, ...] = ()
    """Warnings about assumptions of the simulation, each once."""
    of_graphs: frozenset[int] = frozenset()
    """Indices of the blocks from the pool of CUDA graphs."""
    streams: Mapping[int, int] = field(default_factory=dict)
    """Stream of each block by its index, unless it is the default one (0).

    The allocator never uses the memory of one stream for another.
    """
    awaited: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Kernels of other streams that are unfinished when a block is freed, by the block's index. They are
    kernels of the last step.

    The allocator reuses the block only after they finish.
    """
    launched: tuple[int, ...] = ()
    """Number of events before each kernel; empty if `awaited` is empty."""
    groups: int = 0
    """Number of process groups with communication, besides that of all ranks."""
    passes: tuple[int, ...] = ()
    """Indices of the kernels at which forward or backward passes of the last step begin.

    They are recorded only for a rank of several.
    """
    periods: tuple[Period, ...] = field(default=(), compare=False, repr=False)
    """Parts of the trace that repeat, in order. A nested part comes before the part that contains it."""

    @property
    def phases(self) -> tuple[Mark, ...]:
        """The recorded moments at which phases of the trace begin."""
        return tuple(mark for mark in self.marks if mark.kind is MarkKind.PHASE)

    def memory_of(self, index: int) -> Memory:
        """Return the memory in which block `index` is allocated, such as the pool of CUDA graphs."""
        return Memory.GRAPHS if index in self.of_graphs else Memory.OWN

    @property
    def syncs(self) -> int:
        """Number of times that the host waits for the device in the last step of a trace."""
        return len(self.waits)

    def live(self) -> list[int]:
        """Return the allocated bytes that are live after each allocation or free."""
        live: list[int] = self.changes().cumsum().tolist()
        return live

    def changes(self) -> NDArray[np.int64]:
        """Return the change of allocated bytes at each event, negative for a free, of shape (events,)."""
        import numpy as np

        events = np.array(self.events, np.int64)
        sizes = np.array([block.nbytes for block in self.blocks], np.int64)
        return np.sign(events) * sizes[abs(events) - 1]

    def peak(self) -> Peak:
        """Return the largest allocated bytes of the run, and the first event at which they are reached."""
        live = self.changes().cumsum()
        position = int(live.argmax()) if len(live) else -1
        return Peak(int(live[position]), position) if len(live) and live[position] > 0 else Peak(0, -1)

    def alive_at(self, position: int) -> list[int]:
        """Return the indices of the memory blocks that are live after event `position`."""
        # A dict keeps the order of allocation and removes in constant time.
        alive: dict[int, None] = {}
        for event in self.events[: position + 1]:
            if event > 0:
                alive[event - 1] = None
            else:
                del alive[-event - 1]
        return list(alive)


class Recording(NamedTuple):
    """A trace with all marks of its run, including kernels and waits that the trace's own marks omit."""

    trace: Trace
    marks: tuple[Mark, ...]
    """Every mark of the run, in order: the trace's own, ends of steps, and kernels and waits of the last
    step."""
    varies: bool = False
    """True if the model's code depends on the values in a micro-batch. Then no micro-batch represents the
    others.
    """
    settled: bool = True
    """True if the last two steps replayed every one of their CUDA graphs."""
