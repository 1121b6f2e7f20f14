"""The diagnosis of an out-of-memory error from the content of a log or a memory snapshot."""

from __future__ import annotations

from snugfit.features.diagnosis.changes import general_changes
from snugfit.features.diagnosis.decide import decide
from snugfit.features.diagnosis.match import guess, tensor_sizes
from snugfit.features.diagnosis.result import Diagnosis, FailureKind
from snugfit.features.diagnosis.signs import SIGNS
from snugfit.features.diagnosis.snapshot import SnapshotFacts, read_snapshot
from snugfit.features.diagnosis.text import LoggedError, read_log
from snugfit.units import show_bytes

ON_GPU = frozenset({
    FailureKind.SHORTAGE, FailureKind.FRAGMENTATION, FailureKind.OUTSIDE, FailureKind.LIBRARY,
    FailureKind.UNCLEAR,
})  # fmt: skip
"""Kinds of failures for which the predicted step and smaller recipes matter."""


def diagnose(content: bytes, where: str) -> tuple[Diagnosis, tuple[int, int] | None]:
    """Return the cause of the out-of-memory error in a log or snapshot, and bounds of the failed tensor's
    bytes.

    Raises `UsageError` for content that is neither.
    """
    # Pickles of protocol 2 to 5 begin with these bytes.
    if content[:1] == b"\x80" and content[1:2] in b"\x02\x03\x04\x05":
        return _of_snapshot(read_snapshot(content, where))
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
    # The trace has the size of the block, rounded up to 512 bytes.
    return diagnosis, None if requested is None else (max(1, requested - 511), requested)
