"""The diagnosis of an out-of-memory error from the content of a log or a memory snapshot.

**Changes.** General changes to try after a memory failure, by its cause (such as fragmentation).

**The kind of a failure.** Decision on the cause of an out-of-memory error (such as fragmentation), from the
allocation size and the memory state.
"""

from __future__ import annotations

from snugfit.features.diagnosis.match import guess, tensor_sizes
from snugfit.features.diagnosis.result import Diagnosis, FailureKind, Ledger, SuggestedChange
from snugfit.features.diagnosis.signs import SIGNS
from snugfit.features.diagnosis.snapshot import SnapshotFacts, read_snapshot
from snugfit.features.diagnosis.text import LoggedError, read_log
from snugfit.units import GIB, show_bytes

ON_GPU = frozenset({
    FailureKind.SHORTAGE, FailureKind.FRAGMENTATION, FailureKind.OUTSIDE, FailureKind.LIBRARY,
    FailureKind.UNCLEAR,
})  # fmt: skip
"""Kinds of failures in GPU memory, for which the report shows the predicted step and smaller recipes."""


def diagnose(content: bytes, location: str) -> tuple[Diagnosis, tuple[int, int] | None]:
    """Return the cause of the out-of-memory error in a log or snapshot, and bounds of the failed tensor's
    bytes.

    Raises `UsageError` for content that is neither.
    """
    # Pickles of protocol 2 to 5 begin with these bytes.
    if content[:1] == b"\x80" and content[1:2] in b"\x02\x03\x04\x05":
        return _of_snapshot(read_snapshot(content, location))
    return _of_log(read_log(decode(content)))


def decode(content: bytes) -> str:
    """Return the text of a log: UTF-8, or UTF-16 as PowerShell writes it. Other bytes are replaced.

    Text appended by Windows may be UTF-16 without a byte order mark: ASCII characters with zero bytes.
    """
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return content.decode("utf-16", errors="replace")
    return content.replace(b"\0", b"").decode("utf-8-sig", errors="replace")


def _of_log(error: LoggedError) -> tuple[Diagnosis, tuple[int, int] | None]:
    kind, notes = error.sign.kind, error.notes
    summary = error.sign.summary.format(error.wording)
    requested = sizes = None
    if error.requested is not None:
        requested = round(sum(error.requested) / 2)
    if error.sign is SIGNS[0] and error.requested is not None and requested is not None:
        kind, summary, more = decide(requested, error.ledger)
        notes, sizes = (*notes, *more), tensor_sizes(*error.requested)
    if kind is FailureKind.HOST and requested is not None:
        summary = f"The host had no memory left for a tensor of {show_bytes(requested)}."
    diagnosis = Diagnosis(
        kind=kind,
        summary=summary,
        source="text",
        line=error.line,
        rank=error.rank,
        device=error.device,
        further_errors=error.further,
        requested_bytes=requested,
        traceback=error.traceback,
        phase=error.phase,
        ledger=error.ledger,
        candidates=tuple(guess(sizes)) if sizes else (),
        changes=general_changes(kind),
        notes=notes,
    )
    return diagnosis, sizes


def _of_snapshot(snapshot: SnapshotFacts) -> tuple[Diagnosis, tuple[int, int] | None]:
    kind, notes, requested = FailureKind.NO_FAILURE, snapshot.notes, snapshot.requested
    summary = (
        "No request failed in this snapshot. Its figures are those of its end: "
        f"{show_bytes(snapshot.ledger.allocated_bytes or 0)} in live tensors."
    )
    if requested is not None:
        kind, summary, more = decide(requested, snapshot.ledger)
        notes = (*notes, *more)
    diagnosis = Diagnosis(
        kind=kind,
        summary=summary,
        source="snapshot",
        device=snapshot.device,
        further_errors=max(0, snapshot.failures - 1),
        requested_bytes=requested,
        traceback=snapshot.traceback,
        ledger=snapshot.ledger,
        live=snapshot.live,
        segments=snapshot.segments,
        changes=general_changes(kind, expandable=snapshot.segments.expandable),
        notes=notes,
    )
    # A snapshot has the block's size, rounded up to a multiple of 512 bytes.
    return diagnosis, None if requested is None else (max(1, requested - 511), requested)


# ---- changes -----------------------------------------------------------------------------------------------


_SHORTAGE = (
    ("micro_batches(2), or half the batch per GPU and twice gradient_accumulation_steps",
     "the same update; activations of half the samples; a step is a little slower"),
    ("every_layer (gradient_checkpointing=True)",
     "the same numbers; keeps one activation a layer; a step takes about a third longer"),
    ("adamw_8bit, or lora(r=16)", "smaller optimizer states; the model learns slightly differently"),
)  # fmt: skip
_GENERAL: dict[FailureKind, tuple[tuple[str, str], ...]] = {
    FailureKind.SHORTAGE: _SHORTAGE,
    FailureKind.UNCLEAR: _SHORTAGE,
    FailureKind.FRAGMENTATION: (
        ("expandable (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; PYTORCH_HIP_ALLOC_CONF with ROCm)",
         "segments grow in place, so free pieces join; the same numbers; torch 2.1 or newer on Linux"),
        ("batches of one length: pad to a fixed length, or to multiples of 64",
         "requests repeat, so freed pieces serve again"),
        ("micro_batches(2)", "smaller pieces; the same update"),
    ),
    FailureKind.OUTSIDE: (
        ("end the other processes that `nvidia-smi` lists, such as old notebooks",
         "the memory is free at once"),
        ("another GPU: CUDA_VISIBLE_DEVICES=1", "no change of the run"),
        ("a plan: `snugfit plan MODEL --gpu NAME --memory AMOUNT`",
         "a recipe that fits in the rest of the memory"),
    ),
    FailureKind.LIBRARY: (
        ("micro_batches(2), or half the batch", "leaves memory for libraries outside of the allocator"),
        ("torch.cuda.empty_cache() before the call that failed",
         "returns unallocated memory to the driver; slows the next step"),
        ("torch.cuda.set_per_process_memory_fraction(0.95)",
         "leaves 5 % of the GPU to libraries; the allocator frees its cache earlier"),
    ),
    FailureKind.HOST: (
        ("fewer dataloader workers: loader workers copy the dataset's Python objects",
         "less memory of the host; loading may become slower"),
        ("more memory for the job: --mem of SLURM, --memory of Docker, resources.limits.memory of Kubernetes",
         "no change of the run"),
        ("no offload to the host; weights loaded as safetensors, in the dtype of the training",
         "less memory of the host"),
    ),
    FailureKind.SHARED_MEMORY: (
        ("docker run --shm-size=16g, or an emptyDir of medium Memory at /dev/shm in Kubernetes",
         "no change of the run"),
        ("num_workers=0 or fewer workers, and a smaller prefetch_factor", "loading may become slower"),
        ('torch.multiprocessing.set_sharing_strategy("file_system")', "batches go through files"),
    ),
    FailureKind.NO_FAILURE: (),
}  # fmt: skip


def general_changes(kind: FailureKind, *, expandable: bool = False) -> tuple[SuggestedChange, ...]:
    """Return general advice for a kind of out-of-memory failure, such as a fragmented allocator. With
    `expandable`, the allocator's `expandable_segments` is on already.
    """
    lines = _GENERAL[kind]
    lines = lines[1:] if expandable and kind is FailureKind.FRAGMENTATION else lines
    return tuple(SuggestedChange(change=change, effect=effect) for change, effect in lines)


# ---- the kind of a failure ---------------------------------------------------------------------------------


CONTEXT = 1 * GIB
"""Assumed bytes of GPU memory that a process needs outside of PyTorch's allocator: CUDA context and
libraries. Measured contexts have 0.4 to 0.8 GiB (`job/gpus.json`)."""

NEGLIGIBLE_SHARE = 0.02
"""Share of a GPU's memory below which reserved but unallocated memory is no reason for a failure."""

LARGE_SHARE = 0.05
"""Share of a GPU's memory above which memory outside of PyTorch counts as a reason for a failure."""


def decide(requested: int, ledger: Ledger | None) -> tuple[FailureKind, str, tuple[str, ...]]:
    """Return the cause of a failed allocation, such as fragmentation, with a summary and notes."""
    if ledger is None or ledger.free_bytes is None:
        return FailureKind.UNCLEAR, _without_figures(requested, ledger), ()
    if ledger.allowed_bytes is not None and ledger.free_bytes >= requested:
        return _decide_within_limit(requested, ledger, ledger.allowed_bytes)
    total, free = ledger.total_bytes, ledger.free_bytes
    unallocated = ledger.unallocated_bytes or 0
    if free >= requested:
        # A snapshot does not have the memory limit of the process. If there is one, only fragments can be
        # free.
        kind = FailureKind.FRAGMENTATION if unallocated >= requested else FailureKind.UNCLEAR
        return kind, _with_enough_free(requested, free, unallocated), ()
    foreign = _foreign_bytes(ledger)
    enough_outside = foreign + free >= requested and foreign > unallocated
    if total and enough_outside and foreign >= LARGE_SHARE * total:
        return FailureKind.OUTSIDE, _outside(foreign, ledger), ()
    if unallocated + free >= requested and (not total or unallocated >= NEGLIGIBLE_SHARE * total):
        return FailureKind.FRAGMENTATION, _fragments(requested, unallocated), _about_graphs(ledger)
    return (
        FailureKind.SHORTAGE,
        _shortage(requested, ledger),
        (
            *_about_few(requested, unallocated, free),
            *_about_graphs(ledger),
        ),
    )


def _foreign_bytes(ledger: Ledger) -> int:
    """Return the bytes of GPU memory beyond PyTorch's allocator and an ordinary CUDA context of this
    process.
    """
    if ledger.others_bytes is not None and ledger.process_bytes is not None:
        # Without figures of reserved bytes, none of the process's bytes count as foreign.
        own = max(0, ledger.process_bytes - (ledger.reserved_bytes or ledger.process_bytes) - CONTEXT)
        return ledger.others_bytes + own
    return max(0, (ledger.outside_bytes or 0) - CONTEXT)


def _without_figures(requested: int, ledger: Ledger | None) -> str:
    used = ledger.allocated_bytes if ledger else None
    more = f" PyTorch had allocated {show_bytes(used)}." if used is not None else ""
    return (
        f"PyTorch's allocator found no memory for {show_bytes(requested)}.{more} The text does not give the "
        "free memory, so shortage and fragmentation cannot be distinguished."
    )


def _decide_within_limit(
    requested: int, ledger: Ledger, allowed: int
) -> tuple[FailureKind, str, tuple[str, ...]]:
    """Return cause, summary and notes of an allocation that failed at a limit of `allowed` bytes for the
    process. The GPU had more free memory.
    """
    reserved = (ledger.allocated_bytes or 0) + (ledger.unallocated_bytes or 0)
    within = Ledger(
        total_bytes=allowed,
        # The request failed within the process's limit, so less than its size was free there.
        free_bytes=min(max(0, allowed - reserved), requested - 1),
        allocated_bytes=ledger.allocated_bytes,
        unallocated_bytes=ledger.unallocated_bytes,
        graphs_bytes=ledger.graphs_bytes,
    )
    kind, summary, notes = decide(requested, within)
    limit = f"The process limits itself to {show_bytes(allowed)} (set_per_process_memory_fraction)."
    return kind, f"{limit} {summary}", notes


def _with_enough_free(requested: int, free: int, unallocated: int) -> str:
    first = f"The GPU had {show_bytes(free)} free, more than the request of {show_bytes(requested)}."
    if unallocated >= requested:
        return f"{first} So the process has a limit. {_fragments(requested, unallocated)}"
    return (
        f"{first} Possible reasons are a limit of this process (set_per_process_memory_fraction), memory "
        "that another process freed meanwhile, or a private pool."
    )


def _outside(foreign: int, ledger: Ledger) -> str:
    own = max(0, foreign - (ledger.others_bytes or 0))
    if ledger.others_bytes is None:
        return (
            f"{show_bytes(foreign)} of the GPU belonged neither to PyTorch nor to an ordinary CUDA context: "
            "to other processes, or to other libraries in this process. Without them the request fits."
        )
    if own > ledger.others_bytes:
        return (
            f"Libraries in this process had {show_bytes(own)} outside of PyTorch's allocator, besides the "
            "CUDA context: NCCL, another framework, or a memory pool. Without them the request fits."
        )
    return (
        f"Other processes had {show_bytes(ledger.others_bytes)} of the GPU's "
        f"{show_bytes(ledger.total_bytes or 0)}. Without them the request fits."
    )


def _fragments(requested: int, unallocated: int) -> str:
    return (
        f"PyTorch had reserved {show_bytes(unallocated)} that no tensor used. With the free memory it would "
        f"have sufficed for {show_bytes(requested)}, but not in one piece."
    )


def _shortage(requested: int, ledger: Ledger) -> str:
    total, allocated, free = ledger.total_bytes, ledger.allocated_bytes, ledger.free_bytes or 0
    unallocated = ledger.unallocated_bytes or 0
    if total is None or allocated is None:
        return f"The GPU had {show_bytes(free)} free for a request of {show_bytes(requested)}."
    if requested > total:
        return (
            f"One tensor of {show_bytes(requested)} is larger than the whole GPU ({show_bytes(total)}). Its "
            "shape is probably not the intended one."
        )
    short = requested - free - unallocated
    missing = (
        f"Even with the {show_bytes(unallocated)} that PyTorch had only reserved, "
        f"{show_bytes(short)} were missing."
        if short > 0 and unallocated >= NEGLIGIBLE_SHARE * total
        else f"{show_bytes(requested - free)} were missing."
    )
    return (
        f"Live tensors had {show_bytes(allocated)} of {show_bytes(total)}, and "
        f"{show_bytes(requested)} more did not fit. {missing}"
    )


def _about_few(requested: int, unallocated: int, free: int) -> tuple[str, ...]:
    if unallocated + free < requested or not unallocated:
        return ()
    return (
        f"The {show_bytes(unallocated)} that PyTorch had reserved and not allocated would have served this "
        f"request, but little more: under {NEGLIGIBLE_SHARE:.0%} of the GPU.",
    )


def _about_graphs(ledger: Ledger) -> tuple[str, ...]:
    if not ledger.graphs_bytes or ledger.graphs_bytes < 0.1 * (ledger.allocated_bytes or 0):
        return ()
    return (
        f"{show_bytes(ledger.graphs_bytes)} belong to private pools, such as those of CUDA graphs. Memory of "
        "such a pool serves no other request.",
    )
