"""The diagnosis of an out-of-memory run: its cause, the memory at the failure, the failed allocation, and
changes to try.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from snugfit.documents import JsonDocument
from snugfit.results.ways_out import WaysOut


class FailureKind(StrEnum):
    """Causes of out-of-memory failures, such as fragmentation."""

    SHORTAGE = "shortage"
    """Live tensors and the failed request together need more memory than the GPU has."""
    FRAGMENTATION = "fragmentation"
    """PyTorch had reserved enough unallocated memory, but in pieces that were too small for the request."""
    OUTSIDE = "outside PyTorch"
    """Other processes, or other libraries in this process, used too much GPU memory."""
    LIBRARY = "library"
    """A library or the driver failed to allocate GPU memory outside of PyTorch's allocator."""
    HOST = "host"
    """The host had too little memory."""
    SHARED_MEMORY = "shared memory"
    """The host had too little shared memory, through which data loader workers pass batches."""
    UNCLEAR = "unclear"
    """GPU memory was too small, but the text has too few figures to find the reason."""
    NO_FAILURE = "no failure"
    """The input is a snapshot without a failed request."""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Bytes of GPU memory at the moment of the failure by owner (this process, other processes, PyTorch's
    allocator). An unknown value is null.
    """

    total_bytes: int | None = None
    """Bytes of the GPU's total memory."""
    free_bytes: int | None = None
    """Bytes of GPU memory that no process used."""
    process_bytes: int | None = None
    """Bytes of GPU memory of this process, including its CUDA context and its libraries."""
    allocated_bytes: int | None = None
    """Bytes of live tensors in PyTorch's allocator."""
    unallocated_bytes: int | None = None
    """Bytes that PyTorch's allocator had reserved and not given to a tensor."""
    graphs_bytes: int | None = None
    """Bytes of live tensors in private pools of the allocator, such as those of CUDA graphs."""
    others_bytes: int | None = None
    """Bytes of GPU memory of other processes."""
    allowed_bytes: int | None = None
    """Memory limit in bytes that the process set for itself."""

    @property
    def reserved_bytes(self) -> int | None:
        """Bytes that PyTorch's allocator had reserved; None if they are unknown."""
        if self.allocated_bytes is None or self.unallocated_bytes is None:
            return None
        return self.allocated_bytes + self.unallocated_bytes

    @property
    def outside_bytes(self) -> int | None:
        """Bytes of used GPU memory outside of PyTorch's allocator; None if they are unknown."""
        if self.total_bytes is None or self.free_bytes is None or self.reserved_bytes is None:
            return None
        return max(0, self.total_bytes - self.free_bytes - self.reserved_bytes)


@dataclass(frozen=True, kw_only=True)
class RequestedTensor:
    """A tensor whose allocation may have failed."""

    module: str
    """Dotted name of the module that requests the tensor. Repeated layers share a name. Empty for the
    training loop."""
    operator: str
    """Operator that requests the tensor, such as `aten::mm`."""
    phase: str
    """Phase of the training step, such as `forward`; empty for a guess."""
    kind: str
    """Use of the tensor, such as `activations`."""
    bytes: int
    """Requested bytes of one such tensor."""
    count: int
    """Number of such tensors in one predicted step; 0 for a guess."""
    shapes: str
    """Shapes of the operator's inputs, or the guessed shape; empty if unknown."""
    live_bytes: int | None
    """Predicted bytes of live tensors just before the request; null for a guess."""
    guess: bool
    """True if no predicted step was available, so that the tensor is a guess from its size alone."""


@dataclass(frozen=True, kw_only=True)
class LiveTensors:
    """Live tensors of a memory snapshot that one line of code allocated."""

    code: str
    """Function, file and line of the innermost stack frame outside of PyTorch."""
    bytes: int
    """Requested bytes of all tensors that this line allocated."""
    count: int
    """Number of live tensors that this line allocated."""


@dataclass(frozen=True, kw_only=True)
class SegmentUse:
    """Use of the allocator's segments (blocks from cudaMalloc) in a memory snapshot."""

    segments: int
    """Number of memory segments that the allocator has reserved."""
    partly_used: int
    """Number of segments that contain both live tensors and unallocated memory."""
    unallocated_bytes: int
    """Unallocated bytes in all segments together."""
    largest_free_bytes: int
    """Bytes of the largest unallocated block in any segment."""
    expandable: bool
    """True if segments grow in place (`expandable_segments`)."""


@dataclass(frozen=True, kw_only=True)
class SuggestedChange:
    """A change of settings that helps against this kind of out-of-memory error. It was not checked for this
    run.
    """

    change: str
    """The proposed change, as a sentence or a setting."""
    effect: str
    """Effect of the change on memory, and its cost in time or accuracy."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis(JsonDocument):
    """The cause of an out-of-memory error, with its evidence and the changes that help."""

    what: ClassVar = "diagnosis"

    kind: FailureKind
    """Kind of the failure."""
    summary: str
    """The reason of the failure in one or two sentences."""
    source: str
    """Sort of input: `text` (a log) or `snapshot` (of PyTorch's allocator)."""
    line: int | None = None
    """Number of the line with the error in the log; null for a snapshot."""
    rank: int | None = None
    """Rank of the failed process; null if the log names none."""
    device: int | None = None
    """Index of the GPU that ran out of memory; null if unknown."""
    further_errors: int = 0
    """Number of further memory errors in the log."""
    requested_bytes: int | None = None
    """Bytes of the failed request. Error messages have the size of the allocator's segment: at least 2 MiB,
    mostly in steps of 2."""
    traceback: str = ""
    """The innermost line of code of the traceback, with its file and line number."""
    phase: str = ""
    """Phase of the training step, derived from the traceback; empty if unknown."""
    ledger: Ledger | None = None
    """Memory of the GPU at the failure; null without figures."""
    candidates: tuple[RequestedTensor, ...] = ()
    """Tensors that the failed request may have been for."""
    live: tuple[LiveTensors, ...] = ()
    """The largest live tensors of a snapshot, by line of code."""
    segments: SegmentUse | None = None
    """Use of the allocator's segments in a snapshot; null for a text."""
    changes: tuple[SuggestedChange, ...] = ()
    """Changes that help against this kind of failure, the cheapest first."""
    ways_out: WaysOut | None = None
    """Changes of the recipe with which the predicted step fits. Null without a job, or if it fits already."""
    notes: tuple[str, ...] = ()
    """Sentences on the limits of this diagnosis."""
