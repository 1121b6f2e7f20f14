"""The report of `why-oom` in a terminal: the cause, the memory at the failure, the failed allocation, and
suggested changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from snugfit.features.diagnosis.match import show_request
from snugfit.features.diagnosis.result import (
    Diagnosis,
    FailureKind,
    Ledger,
    RequestedTensor,
    SegmentUse,
    SuggestedChange,
)
from snugfit.report.text.table import PlainTable, table
from snugfit.report.text.terminal import words
from snugfit.units import show_bytes

_TITLES = {
    FailureKind.SHORTAGE: "Shortage of GPU memory.",
    FailureKind.FRAGMENTATION: "Fragmentation.",
    FailureKind.OUTSIDE: "Memory outside of PyTorch.",
    FailureKind.LIBRARY: "A library without GPU memory.",
    FailureKind.HOST: "Memory of the host.",
    FailureKind.SHARED_MEMORY: "Shared memory of the host.",
    FailureKind.UNCLEAR: "GPU memory, reason unclear.",
    FailureKind.NO_FAILURE: "No failure.",
}


def render(diagnosis: Diagnosis, ways_out: Sequence[str] = ()) -> RenderableType:
    """Return the terminal report of one diagnosis, about one screen.

    `ways_out` are sentences on changes with which the predicted step fits into memory.
    """
    parts: list[RenderableType] = [
        words(_TITLES[diagnosis.kind], "bold").append(" ").append(words(diagnosis.summary, "not bold"))
    ]
    parts += [words(sentence) for sentence in _about_place(diagnosis)]
    if diagnosis.ledger is not None:
        parts.append(_ledger_table(diagnosis.ledger))
    parts += _about_request(diagnosis)
    if diagnosis.segments is not None:
        parts.append(words(_about_segments(diagnosis.segments)))
    if diagnosis.live:
        rows = [(line.code, f"{line.count:,}", show_bytes(line.bytes)) for line in diagnosis.live]
        parts.append(table(("Largest live tensors, by line of code", "Tensors>", "Size>"), rows))
    parts += _changes(diagnosis.changes, ways_out)
    parts += [words(f"Note: {note}", "yellow") for note in diagnosis.notes]
    return Group(*parts)


def _about_place(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield a line on the position of the error message in the log or snapshot, and one on the failing line
    of code.
    """
    position = [f"line {diagnosis.line:,}"] if diagnosis.line is not None else []
    position += [f"rank {diagnosis.rank}"] if diagnosis.rank is not None else []
    position += [f"GPU {diagnosis.device}"] if diagnosis.device is not None else []
    source = "log" if diagnosis.source == "text" else "snapshot"
    more = f"; {diagnosis.further_errors:,} further in this {source}" if diagnosis.further_errors else ""
    yield f"Place: {', '.join(position)}{more}."
    if diagnosis.traceback:
        phase = f"{diagnosis.phase}, " if diagnosis.phase else ""
        yield f"Code: {phase}{diagnosis.traceback}"


def _ledger_table(ledger: Ledger) -> PlainTable:
    """Return a table of GPU memory by owner (such as other processes) at the failure, as far as it is
    known.
    """
    outside = ledger.outside_bytes
    own = None
    if ledger.process_bytes is not None and ledger.reserved_bytes is not None:
        own = max(0, ledger.process_bytes - ledger.reserved_bytes)
    # The sum of the two rows above is shown only if neither of them is known.
    rest = outside if own is None and ledger.others_bytes is None else None
    lines = (
        ("GPU in total", ledger.total_bytes, "without the driver's reserve"),
        ("free", ledger.free_bytes, "for any process"),
        ("allowed", ledger.allowed_bytes, "limit of this process"),
        ("this process", ledger.process_bytes, "PyTorch, CUDA context, libraries"),
        ("  live tensors", ledger.allocated_bytes, "allocated by PyTorch"),
        ("  reserved only", ledger.unallocated_bytes, "reserved by PyTorch, not allocated"),
        ("  outside PyTorch", own, "CUDA context and libraries"),
        ("other processes", ledger.others_bytes, ""),
        ("outside PyTorch", rest, "CUDA context, libraries, other processes"),
    )
    rows = [(name, show_bytes(size), note) for name, size, note in lines if size is not None]
    return table(("Memory at that moment", "Size>", "Contents"), rows)


def _about_request(diagnosis: Diagnosis) -> list[RenderableType]:
    """Return a sentence on the failed allocation, and a table of the tensors that may have caused it."""
    if diagnosis.requested_bytes is None or diagnosis.kind is FailureKind.HOST:
        return []
    parts: list[RenderableType] = [
        words(show_request(diagnosis.requested_bytes, from_text=diagnosis.source == "text"))
    ]
    candidates = diagnosis.candidates
    if candidates and candidates[0].guess:
        parts.append(
            words("Guesses from the size alone (--for MODEL or --arguments FILE searches a predicted step):")
        )
        parts += [words(f"- {candidate.module}: {candidate.shapes}") for candidate in candidates]
    elif candidates:
        parts.append(_candidates_table(candidates))
    return parts


def _candidates_table(candidates: Sequence[RequestedTensor]) -> PlainTable:
    rows = [
        (
            candidate.module or "(the loop)",
            candidate.operator,
            candidate.phase,
            candidate.kind,
            candidate.shapes,
            f"{candidate.count:,}",
            show_bytes(candidate.bytes),
            "" if candidate.live_bytes is None else show_bytes(candidate.live_bytes),
        )
        for candidate in candidates
    ]
    heads = (
        "Tensors of this size in the predicted step", "Operator", "Phase", "Kind", "Inputs", "Tensors>",
        "Size>", "Live before>",
    )  # fmt: skip
    return table(heads, rows)


def _about_segments(use: SegmentUse) -> str:
    return (
        f"{use.segments:,} segments, {use.partly_used:,} of them partly used. "
        f"{show_bytes(use.unallocated_bytes)} are unallocated, the largest piece "
        f"{show_bytes(use.largest_free_bytes)}. Segments "
        f"{'grow in place' if use.expandable else 'do not grow (no expandable_segments)'}."
    )


def _changes(changes: Sequence[SuggestedChange], ways_out: Sequence[str]) -> list[RenderableType]:
    """Return lines on the changes with which the predicted step fits into memory, or else on general
    changes.
    """
    if ways_out:
        return [Text(), *(words(sentence) for sentence in ways_out)]
    if not changes:
        return []
    lines = [Text(), words("General changes, not checked for this run:", "bold")]
    lines += [
        words(f"{number}. {change.change}: {change.effect}.") for number, change in enumerate(changes, 1)
    ]
    return list(lines)
