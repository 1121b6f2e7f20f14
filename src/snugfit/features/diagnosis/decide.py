"""Decision on the cause of an out-of-memory error (such as fragmentation), from the allocation size and the
memory state.
"""

from __future__ import annotations

from snugfit.features.diagnosis.result import FailureKind, Ledger
from snugfit.units import GIB, show_bytes

CONTEXT = 1 * GIB
"""Bytes of GPU memory that a process needs outside of PyTorch's allocator: the CUDA context and its
libraries. Measured contexts have 0.4 to 0.8 GiB (`job/gpus.json`)."""

FEW = 0.02
"""Share of a GPU's memory below which unallocated memory makes no difference to a run."""

MANY = 0.05
"""Share of a GPU's memory above which memory outside of PyTorch counts as a reason."""


def decide(requested: int, ledger: Ledger | None) -> tuple[FailureKind, str, tuple[str, ...]]:
    """Return the cause of a failed allocation, such as fragmentation, with a summary and notes."""
    if ledger is None or ledger.free_bytes is None:
        return FailureKind.UNCLEAR, _without_figures(requested, ledger), ()
    if ledger.allowed_bytes is not None and ledger.free_bytes >= requested:
        return _decide_within_limit(requested, ledger, ledger.allowed_bytes)
    total, free = ledger.total_bytes, ledger.free_bytes
    unallocated = ledger.unallocated_bytes or 0
    if free >= requested:
        # Snapshots omit a limit of the process, under which only fragments can be free.
        kind = FailureKind.FRAGMENTATION if unallocated >= requested else FailureKind.UNCLEAR
        return kind, _with_enough_free(requested, free, unallocated), ()
    foreign = _foreign_bytes(ledger)
    enough_outside = foreign + free >= requested and foreign > unallocated
    if total and enough_outside and foreign >= MANY * total:
        return FailureKind.OUTSIDE, _outside(foreign, ledger), ()
    if unallocated + free >= requested and (not total or unallocated >= FEW * total):
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
        # Without reserved bytes, no part of this process counts as foreign.
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
        # The request failed within the limit, so less than it was free there.
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
        if short > 0 and unallocated >= FEW * total
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
        f"request, but little more: under {FEW:.0%} of the GPU.",
    )


def _about_graphs(ledger: Ledger) -> tuple[str, ...]:
    if not ledger.graphs_bytes or ledger.graphs_bytes < 0.1 * (ledger.allocated_bytes or 0):
        return ()
    return (
        f"{show_bytes(ledger.graphs_bytes)} belong to private pools, such as those of CUDA graphs. Memory of "
        "such a pool serves no other request.",
    )
