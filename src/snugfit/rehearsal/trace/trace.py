"""The trace: every allocation, free and kernel of a recorded run, in order, each with its origin.

A trace is plain data. `blocks` are the allocations, in order; `events` holds allocations and frees: `i + 1`
allocates block `i`, `-(i + 1)` frees it. Blocks that outlive the run (weights, states) are never freed. What
happens between two events is in `marks`. Everything snugfit says about bytes is a pure function of these
three lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import NamedTuple

COPY_IN = "Memcpy HtoD"
"""A kernel that copies from the host's memory, as CUDA's profiler calls it."""

GENERATED = "generated::"
"""Begins the name of a kernel that a compiler generated."""

PREPARED = "Memcpy HtoD, prepared"
"""Such a copy of what so many (`Kernel.tensors`) worker processes made, in page-locked memory."""


COPY_OUT = "Memcpy DtoH, activations"
"""A copy of activations to page-locked memory of the host, by a stream that only copies."""

COPY_BACK = "Memcpy HtoD, activations"
"""Such a copy to the device."""

AWAIT_COPY = "cudaStreamWaitEvent"
"""The device computes no further before such a copy is done: the one behind which so many others
(`Kernel.tensors`) were asked for."""

PREFETCH = "cudaMemPrefetchAsync"
"""The host asks the driver for pages of managed memory, before the device needs them."""

COPIES = frozenset({COPY_OUT, COPY_BACK})
"""What runs beside the computation, one after the other."""

STAGE_OUT = "Memcpy DtoH, update"
"""A copy of weights or gradients to page-locked memory of the host, in its turn on the device."""

UPDATE_ON_HOST = "AdamW on the host"
"""The host waits for the device and updates weights itself."""

STAGE_BACK = "Memcpy HtoD, update"
"""A copy of such weights to the device, in its turn."""

WORK_ON_HOST = "pass of the host"
"""The host reads and writes weights, gradients or states itself."""

SWAPPED = "swap with the disk"
"""The host waits for a disk that reads or writes weights, gradients or states."""

HELD_ON_HOST = "memory of the host"
"""No work: so many bytes of weights, gradients and states are on the host."""

PINNED_ON_HOST = "page-locked on the host"
"""No work: so many of them are page-locked."""

SHARD_HOOKS = "hooks of sharded weights"
"""So many (`Kernel.tensors`) of FSDP2's hooks run on the host, in Python: what gathers, drops and scatters a
group's weights."""

SHARDED_OPERANDS = "operands in shards"
"""An operator is given so many (`Kernel.tensors`) tensors of which each rank has a part (DTensor): the host
looks at each, in Python, before the operator runs on the parts."""

PART_OPERATORS = "operators on parts of tensors"
"""So many (`Kernel.tensors`) of DTensor's: the host looks up how the result is spread, in Python."""

WEIGHTS_APART = "gradients of weights apart"
"""So many (`Kernel.tensors`) weights whose gradients a pipeline computes apart from those of inputs: the host
walks the graph for each, in Python."""

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
"""What the device has no part in."""

STAGED = frozenset({STAGE_OUT, STAGE_BACK})
"""Copies that the device makes in their turn."""

TRITON = "triton::"
"""Begins the name of a kernel that a library wrote in Triton and launches from Python."""


ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "nccl::all_reduce", "nccl::all_gather", "nccl::reduce_scatter"
ALL_TO_ALL, BROADCAST, SEND, RECEIVE = "nccl::all_to_all", "nccl::broadcast", "nccl::send", "nccl::recv"
COLLECTIVES = frozenset({ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, SEND, RECEIVE})
"""Kernels in which GPUs exchange tensors. `Kernel.nbytes` is what NCCL's tests call the size: of the whole
tensor that is gathered or scattered."""

ALONE = (1, 0)
"""`Kernel.peers` of a kernel that exchanges nothing."""

WITH_BIAS = frozenset({"aten::addmm", "aten::baddbmm", "aten::addmm_", "aten::baddbmm_"})
"""Products whose first operand is added."""

MATRIX_PRODUCTS = WITH_BIAS | {"aten::mm", "aten::bmm", "aten::_grouped_mm", "aten::_scaled_mm"}

CASTS, STRIDED, TRANSPOSED, WITH_DROPOUT = "casts", "strided", "transposed", "with dropout"
"""The values that `Kernel.layout` may have."""

POINTWISE, REDUCTION = "generated pointwise", "generated reduction"
WITH_FUNCTIONS, WITH_RANDOM = "generated with functions", "generated with random numbers"
"""And of a kernel that a compiler generated: what it computes in. `with functions` calls `erf` or `tanh`,
`with random numbers` draws them; either takes longer than the bytes."""


class Block(NamedTuple):
    """One allocation of a run, of at least one byte."""

    nbytes: int
    """Bytes that were asked for, before the allocator rounds them."""
    operator: str
    """Which operator asked, by torch's name (`aten::addmm`), or what for (`cuBLAS workspace`)."""
    module: str
    """Dotted name of the module that ran."""
    phase: str
    step: int
    """Optimizer step; -1 before the first."""
    kind: str
    """A `Kind`, decided when the run was over."""


DEFAULT_STREAM, GRAPH_STREAM = 0, -1
"""Numbers of streams: of the one that computes, and of the one that CUDA graphs are recorded on. Others count
from 1, in the order in which they are made."""


class Memory(Enum):
    """Where a run allocates."""

    OWN = auto()
    """In the allocator's own pools, of the stream that is current."""
    GRAPHS = auto()
    """In the pool that belongs to CUDA graphs."""
    NOWHERE = auto()
    """What a graph that is played back gives lies where it did when it was recorded."""


class MarkKind(StrEnum):
    """What happens between two events of a run."""

    PHASE = "phase"
    """A phase of a step begins."""
    CONTEXT_RELEASED = "context released"
    """The driver releases the address space that it held since it made the context: once in a run."""
    CACHE_EMPTIED = "cache emptied"
    """The allocator gives back what it keeps for later (`torch.cuda.empty_cache`)."""
    KERNEL = "kernel"
    """The next kernel of the steady step runs."""
    WAIT = "wait"
    """The host waits for the device."""
    STEP_END = "step end"
    """An optimizer step has ended."""


class Mark(NamedTuple):
    """A moment of a run."""

    event: int
    """How many events come before it."""
    step: int
    """Optimizer step; -1 before the first."""
    phase: str
    """The phase that the run is in, or that begins."""
    kind: MarkKind = MarkKind.PHASE


class Kernel(NamedTuple):
    """One operator of the steady step that runs on the device."""

    operator: str
    module: str
    phase: str
    flops: int
    nbytes: int
    """Bytes that it reads and writes."""
    shapes: tuple[tuple[int, ...], ...]
    """Of its first three tensor inputs."""
    dtype: str
    """Of its first input; `tf32` for a product of fp32 tensors that runs in it."""
    tensors: int
    """How many it is given: lists of them are what foreach optimizers work on."""
    layout: str = ""
    """What decides, besides its operands' sizes, which kernel runs. For a pointwise operator or a copy
    `strided` when its operands lie in different ways, `transposed` when one of them, larger than any cache,
    is read across its rows, and `casts` when it mixes precisions; for attention `with dropout`; of a kernel
    that a compiler generated, what bounds it (`POINTWISE` and what follows it)."""
    leading: tuple[int, ...] = ()
    """Of a product of matrices: their leading dimensions, as BLAS calls the elements from row to row."""
    recomputed: bool = False
    """Whether it runs forward again in the backward pass."""
    modules: int = 0
    """Modules in which it is the first to run."""
    views: int = 0
    """Operators since the last kernel that run none: views of tensors, and empty ones."""
    checkpoints: int = 0
    """Checkpointed parts that began since then, or began to be computed again."""
    intercepted: int = 0
    """Operators that selective checkpointing looked at since then, in Python."""
    compiled: bool = False
    """Whether a compiled program launches it."""
    programs: int = 0
    """Compiled programs that began since then."""
    functions: int = 0
    """Autograd Functions of libraries, in Python, that began since then."""
    played: bool = False
    """Whether a CUDA graph runs it, which the host launches as one."""
    stream: int = DEFAULT_STREAM
    """The stream it runs in: at once with those of other streams, after those of its own."""
    after: tuple[int, ...] = ()
    """Numbers of the kernels in other streams that its stream waits for first."""
    peers: tuple[int, int] = ALONE
    """How many GPUs exchange tensors in it, and how far apart their ranks are. Of what goes from one to
    another: how far on that is, below 0 for a rank before."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the first input, if it is a number that products know."""
        return 1 if "float8" in self.dtype else 2 if "16" in self.dtype else 4


class Work(NamedTuple):
    """What the device does in a part of a step."""

    kernels: tuple[Kernel, ...] = ()
    waits: tuple[int, ...] = ()
    """Before which of the kernels the host waits, ascending."""


class Period(NamedTuple):
    """A part of a run that repeats: the same events, and the same blocks but for their numbers."""

    start: int
    """How many events come before it."""
    events: int
    """How many it has."""
    blocks: int
    """Blocks that it allocates: by so much the numbers grow each time."""
    times: int


class Peak(NamedTuple):
    """The moment of a run at which the most requested bytes live."""

    nbytes: int
    """Requested bytes, before the allocator rounds them."""
    position: int
    """Of the event that first reaches them; -1 where nothing is allocated."""


@dataclass(frozen=True)
class Trace:
    """What a run of some optimizer steps requests of a device."""

    blocks: tuple[Block, ...]
    """In the order of their allocation."""
    events: tuple[int, ...]
    """Allocations (`i + 1`) and frees (`-(i + 1)`) of block `i`."""
    marks: tuple[Mark, ...]
    """Beginnings of phases, where the context is released and where a cache is emptied, in order."""
    kernels: tuple[Kernel, ...]
    """Of the last step only: the steady one."""
    waits: tuple[int, ...]
    """Where the last step's host waits for the device: before which of its kernels."""
    attention: tuple[str, ...]
    """Which attention kernels were chosen."""
    doubts: tuple[str, ...] = ()
    """Sentences on what the rehearsal had to assume, each once."""
    of_graphs: frozenset[int] = frozenset()
    """Indices of the blocks that the allocator takes from the pool of CUDA graphs."""
    streams: Mapping[int, int] = field(default_factory=dict)
    """The stream that each block is of, by its index, where that is not the default one (0). The allocator
    keeps what it has of one stream from every other."""
    awaited: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Kernels of the last step that other streams than a block's own still had to do when it was freed, by
    the block's index: until they are done the allocator does not hand it out again."""
    launched: tuple[int, ...] = ()
    """How many events come before each kernel, where blocks wait for some."""
    groups: int = 0
    """Process groups besides that of all ranks in which the run has exchanged something."""
    passes: tuple[int, ...] = ()
    """Where passes of the last step begin, forward or backward: before which of its kernels; of a rank of
    several alone."""
    periods: tuple[Period, ...] = field(default=(), compare=False, repr=False)
    """Parts that are known to repeat, in order; one may lie in another, which then comes first."""

    @property
    def phases(self) -> tuple[Mark, ...]:
        """The marks at which phases begin."""
        return tuple(mark for mark in self.marks if mark.kind is MarkKind.PHASE)

    def memory_of(self, index: int) -> Memory:
        """Where block `index` is allocated."""
        return Memory.GRAPHS if index in self.of_graphs else Memory.OWN

    @property
    def syncs(self) -> int:
        """How often the last step waits for the device."""
        return len(self.waits)

    def live(self) -> Iterator[int]:
        """Requested bytes alive after each event."""
        current = 0
        for event in self.events:
            current += self.blocks[event - 1].nbytes if event > 0 else -self.blocks[-event - 1].nbytes
            yield current

    def peak(self) -> Peak:
        """The moment at which the most requested bytes live, and the first such."""
        peak = Peak(0, -1)
        for position, current in enumerate(self.live()):
            if current > peak.nbytes:
                peak = Peak(current, position)
        return peak

    def alive_at(self, position: int) -> list[int]:
        """Indices of the blocks alive after event `position`."""
        alive: dict[int, None] = {}
        for event in self.events[: position + 1]:
            if event > 0:
                alive[event - 1] = None
            else:
                del alive[-event - 1]
        return list(alive)


class Recording(NamedTuple):
    """A trace, with the moments that the trace itself leaves out."""

    trace: Trace
    marks: tuple[Mark, ...]
    """Every mark of the run, in order: the trace's own, each end of a step, and each kernel and wait of the
    last step."""
    varies: bool = False
    """Whether values of one micro-batch decided otherwise than those of another, so that none stands for the
    rest."""
    settled: bool = True
    """Whether the last two steps played back every CUDA graph that they have."""
