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
    """Live tensors and the request need more than the GPU has."""
    FRAGMENTATION = "fragmentation"
    """PyTorch had reserved enough unallocated memory, in pieces that did not serve the request."""
    OUTSIDE = "outside PyTorch"
    """Memory of other processes, or of other libraries in this process, left too little."""
    LIBRARY = "library"
    """A library or the driver failed to allocate GPU memory outside of PyTorch's allocator."""
    HOST = "host"
    """The memory of the host was short."""
    SHARED_MEMORY = "shared memory"
    """The host's shared memory, through which loader workers pass batches, was short."""
    UNCLEAR = "unclear"
    """GPU memory was short, and the text has too few figures for the reason."""
    NO_FAILURE = "no failure"
    """A snapshot without a failed request."""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Bytes of GPU memory at the moment of the failure by owner (this process, other processes, PyTorch's
    allocator). An unknown value is null.
    """

    total_bytes: int | None = None
    """Memory of the GPU."""
    free_bytes: int | None = None
    """Memory that the driver could still hand out."""
    process_bytes: int | None = None
    """Memory of this process, with the CUDA context and the memory of libraries."""
    allocated_bytes: int | None = None
    """Bytes of live tensors in PyTorch's allocator."""
    unallocated_bytes: int | None = None
    """Bytes that PyTorch's allocator had reserved, and that no tensor used."""
    graphs_bytes: int | None = None
    """Bytes of live tensors in private pools, such as those of CUDA graphs."""
    others_bytes: int | None = None
    """Memory of other processes."""
    allowed_bytes: int | None = None
    """Limit that the process set for itself."""

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
    """Dotted name of the module. Layers of one stack share a name. Empty for the training loop."""
    operator: str
    """Operator that requests the tensor, by torch's name."""
    phase: str
    """Phase of the step, such as `forward`; empty for a guess."""
    kind: str
    """Use of the bytes, such as `activations`."""
    bytes: int
    """Requested bytes of one such tensor."""
    count: int
    """Number of such tensors in one predicted step; 0 for a guess."""
    shapes: str
    """Shapes of the operator's inputs, or the guessed shape; empty where unknown."""
    live_bytes: int | None
    """Predicted bytes of live tensors before the request; null for a guess."""
    guess: bool
    """True if no predicted step was compared: only the size fits."""


@dataclass(frozen=True, kw_only=True)
class LiveTensors:
    """Live tensors of a memory snapshot that one line of code allocated."""

    code: str
    """Function, file and line of the innermost frame outside of PyTorch."""
    bytes: int
    """Requested bytes of all of them."""
    count: int
    """Number of these tensors."""


@dataclass(frozen=True, kw_only=True)
class SegmentUse:
    """Use of the allocator's segments (blocks from cudaMalloc) in a memory snapshot."""

    segments: int
    """Number of all segments."""
    partly_used: int
    """Number of segments with both live tensors and unallocated memory."""
    unallocated_bytes: int
    """Unallocated bytes in all segments."""
    largest_free_bytes: int
    """Size of the largest unallocated piece."""
    expandable: bool
    """True if segments grow in place (`expandable_segments`)."""


@dataclass(frozen=True, kw_only=True)
class SuggestedChange:
    """A change of settings that helps against this kind of out-of-memory error. It was not checked for this
    run.
    """

    change: str
    """The change, as text."""
    effect: str
    """Its effect and its cost."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis(JsonDocument):
    """The cause of an out-of-memory error, with its evidence and the changes that help."""

    what: ClassVar = "diagnosis"

    kind: FailureKind
    """Kind of the failure."""
    summary: str
    """The reason in one or two sentences."""
    source: str
    """The input: `text` or `snapshot`."""
    line: int | None = None
    """Number of the log's line with the error; null for a snapshot."""
    rank: int | None = None
    """Rank of the process that failed; null where the log names none."""
    device: int | None = None
    """Index of the GPU; null where it is unknown."""
    further_errors: int = 0
    """Number of further errors of this sort in the log."""
    requested_bytes: int | None = None
    """Size of the failed request. A text has the allocator's size: at least 2 MiB, mostly in steps of 2."""
    traceback: str = ""
    """The last line of code of the traceback, with its place."""
    phase: str = ""
    """Phase of the step by the traceback; empty where it shows none."""
    ledger: Ledger | None = None
    """Memory of the GPU at that moment; null where no figures are available."""
    candidates: tuple[RequestedTensor, ...] = ()
    """Tensors that the failed request may have been for."""
    live: tuple[LiveTensors, ...] = ()
    """The largest live tensors of a snapshot, by line of code."""
    segments: SegmentUse | None = None
    """Use of the allocator's segments in a snapshot; null for a text."""
    changes: tuple[SuggestedChange, ...] = ()
    """Changes that help against failures of this kind, the cheapest first."""
    ways_out: WaysOut | None = None
    """Changes with which the predicted step fits; null without a job, or if the predicted step fits."""
    notes: tuple[str, ...] = ()
    """Sentences on the limits of this diagnosis."""
