"""The lengths of a dataset's sequences, as a histogram of tokens per sample.

A batch is as long as its longest sample. The memory and time of a run therefore depend on the distribution of
lengths, not on their mean. Lengths come from a file of the user's. The suffix decides the format:

| name            | content                                                                        |
|-----------------|--------------------------------------------------------------------------------|
| `.txt`          | one length a line                                                              |
| `.csv`, `.tsv`  | a column of lengths, with a head                                               |
| `.jsonl`        | a number a line, or an object with a length (or a list of token ids) under a key |
| `.json`         | a list of lengths, or a histogram: `{"128": 5000, "512": 40}`                  |

The column or key must be named only if it is ambiguous. A single column is taken, else one of `NAMES`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from snugfit.data.rows import Row, Rows
from snugfit.data.text_rows import LineRows, TableRows, read_text
from snugfit.errors import UsageError, did_you_mean
from snugfit.job.job import LARGEST_LENGTH
from snugfit.user_files import load_json, refuse_no_file, refuse_unreadable

LARGEST_FILE = 64 << 20
"""Largest size in bytes of a file of lengths: ten million lines. A histogram represents more samples."""

_TOO_LARGE = ' Use a histogram instead: a .json file with {"128": 5000, ...}.'

MOST_SAMPLES = 10**12
NAMES = ("length", "lengths", "num_tokens", "n_tokens", "input_length", "input_ids")
"""Default names of columns and keys that contain lengths. `length` is the default of transformers' Trainer.
"""

FORMS = (".txt", ".csv", ".tsv", ".jsonl", ".json")
_NUMBER = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """A histogram of the lengths of a dataset's samples, in tokens."""

    added_keys: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "samples": (int, ""),
        "tokens": (int, ""),
        "shortest": (int, ""),
        "median": (int, ""),
        "mean": (float, ""),
        "longest": (int, ""),
        "histogram": (Mapping[str, int], "Samples by their tokens."),
    }
    """JSON keys that `to_json` adds, with their types and descriptions. An empty description is that of the
    property.
    """
    left_out_keys: ClassVar[tuple[str, ...]] = ("counts",)
    """Fields that `to_json` leaves out."""

    counts: tuple[tuple[int, int], ...]
    """Histogram of lengths as pairs (tokens, number of samples), the shortest first."""

    source: str = "given"
    """Name of the file that the lengths are from, or another name of their origin."""

    def __post_init__(self) -> None:
        if not self.counts:
            raise UsageError(f"{self.source}: it contains no lengths. Give one or more.")

    @classmethod
    def read(cls, path: Path | str, *, column: str | None = None) -> Self:
        """Read the sequence lengths from a file. Raises `UsageError` with the file, the line and the allowed
        values.
        """
        path = Path(path)
        suffix = path.suffix.lower()
        if suffix not in FORMS:
            raise UsageError(
                f"{path}: lengths can be read from {', '.join(FORMS)}, by the end of the file's name. "
                "Rename the file, or write it in one of these forms."
            )
        if column is not None and suffix in (".txt", ".json"):
            raise UsageError(f"{path}: a {suffix} file has no columns. Leave --column {column} out.")
        refuse_no_file(path, "file of lengths", LARGEST_FILE, _TOO_LARGE)
        with refuse_unreadable(path):
            pairs = _of_document(path) if suffix == ".json" else _of_rows(path, column)
            return cls._count(pairs, str(path))

    @classmethod
    def of(cls, lengths: Iterable[int] | Mapping[int, int], *, source: str = "given") -> Self:
        """Return the sequence lengths in a list, or in a histogram `{tokens: samples}`. Raises `UsageError`
        for invalid lengths.
        """
        if isinstance(lengths, str) or not isinstance(lengths, Iterable):
            raise UsageError(
                f"{source}: {lengths!r} is neither a list of lengths nor a histogram {{128: 5000}}. "
                "A file of them: Lengths.read(path)."
            )
        pairs: Iterable[tuple[Any, Any]] = (
            lengths.items() if isinstance(lengths, Mapping) else ((length, 1) for length in lengths)
        )
        return cls._count(
            ((_length(length, source), _samples(count, source)) for length, count in pairs), source
        )

    @classmethod
    def _count(cls, pairs: Iterable[tuple[int, int]], source: str) -> Self:
        counts: Counter[int] = Counter()
        for length, samples in pairs:
            counts[length] += samples
        if sum(counts.values()) > MOST_SAMPLES:
            raise UsageError(
                f"{source}: it has {sum(counts.values()):,} samples, and {MOST_SAMPLES:,} are allowed. "
                "Divide the number of samples of each length by the same factor."
            )
        # The unary plus drops lengths that no sample has.
        return cls(counts=tuple(sorted((+counts).items())), source=source)

    @property
    def samples(self) -> int:
        """Number of samples in the dataset."""
        return sum(samples for _, samples in self.counts)

    @property
    def tokens(self) -> int:
        """Number of tokens of all samples together."""
        return sum(length * samples for length, samples in self.counts)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.counts[-1][0]

    @property
    def shortest(self) -> int:
        """Tokens of the shortest sample."""
        return self.counts[0][0]

    @property
    def mean(self) -> float:
        """Mean number of tokens per sample."""
        return self.tokens / self.samples

    @property
    def median(self) -> int:
        """Median number of tokens: at least half of the samples have this many or fewer."""
        counted, half = 0, self.samples / 2
        for length, samples in self.counts:
            counted += samples
            if counted >= half:
                return length
        raise AssertionError("there are lengths")

    def cut(self, at: int) -> Lengths:
        """Return the lengths with each sample truncated to at most `at` tokens. Raises `UsageError` for an
        invalid length."""
        longest = _length(at, "truncation")
        pairs = ((min(length, longest), samples) for length, samples in self.counts)
        return Lengths._count(pairs, f"{self.source}, cut at {longest}")

    def to_json(self) -> dict[str, Any]:
        """Return the histogram of lengths and a summary (such as the mean) as a JSON object."""
        return {
            "source": self.source,
            "samples": self.samples,
            "tokens": self.tokens,
            "shortest": self.shortest,
            "median": self.median,
            "mean": self.mean,
            "longest": self.longest,
            "histogram": {str(length): samples for length, samples in self.counts},
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Lengths:
        """Return the lengths in a JSON object of `to_json`."""
        histogram = {int(length): samples for length, samples in document["histogram"].items()}
        return cls.of(histogram, source=document["source"])


# ---- one number -----------------------------------------------------------------------------------------


def _length(value: object, location: str) -> int:
    """Return the length in tokens that a value of a file represents: a number, or a list of token ids."""
    if isinstance(value, list):
        value = len(value)
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = int(value.strip())
    # In Python, a bool is an int, but it is not a length.
    if type(value) is not int:
        hint = " Count tokens, not text." if isinstance(value, str) and len(value) > 40 else ""
        raise UsageError(
            f"{location}: {_short(value)} is not a length; it must be a whole number of tokens.{hint}"
        )
    if not 1 <= value <= LARGEST_LENGTH:
        raise UsageError(
            f"{location}: {value} is not a length; a sequence has 1 to {LARGEST_LENGTH:,} tokens. Correct "
            "it, or remove it."
        )
    return value


def _samples(value: object, location: str) -> int:
    if type(value) is not int or not 0 <= value <= MOST_SAMPLES:
        raise UsageError(
            f"{location}: {_short(value)} is not a number of samples; it must be a whole number from 0 to "
            f"{MOST_SAMPLES:,}."
        )
    return value


def _short(value: object) -> str:
    if isinstance(value, dict):
        return "an object"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


# ---- files ----------------------------------------------------------------------------------------------


def _of_rows(path: Path, column: str | None) -> Iterator[tuple[int, int]]:
    """Yield (tokens, 1) for each row of a lengths file."""
    suffix = path.suffix.lower()
    rows: Rows
    if suffix in (".csv", ".tsv"):
        rows = TableRows(path)
        column = _column(list(rows.columns), column, str(path))
    else:
        rows = LineRows(path, _json_row if suffix == ".jsonl" else _number_row)
    for index, row in enumerate(rows):
        location = rows.location(index)
        yield _length(row[_column(list(row), column, location)], location), 1


def _number_row(line: str, location: str) -> Row:
    return {NAMES[0]: line.rstrip("\r\n")}


def _json_row(line: str, location: str) -> Row:
    value = load_json(line, location, constants=True)
    return value if isinstance(value, dict) else {NAMES[0]: value}


def _column(heads: list[str], column: str | None, location: str) -> str:
    """Return the name of the column with the lengths. Raises `UsageError` if it is missing or ambiguous."""
    known = column if column is not None else next((name for name in NAMES if name in heads), None)
    if known is None and len(heads) == 1:
        known = heads[0]
        if _NUMBER.fullmatch(known):
            raise UsageError(
                f"{location}: the first line is {known}; a table must begin with the names of its columns. "
                "Add that line."
            )
    if known is None or known not in heads:
        listed = ", ".join(heads[:12]) or "none"
        problem = f"no column {known!r}.{did_you_mean(known, heads)}" if known else "which column?"
        raise UsageError(f"{location}: {problem} Name one with --column: {listed}.")
    return known


def _of_document(path: Path) -> Iterator[tuple[int, int]]:
    """Yield the pairs (tokens, samples) in a JSON file with a list of lengths or a histogram."""
    value, location = load_json(read_text(path), str(path), constants=True), str(path)
    if isinstance(value, list):
        yield from ((_length(length, location), 1) for length in value)
    elif isinstance(value, dict):
        yield from ((_length(length, location), _samples(count, location)) for length, count in value.items())
    else:
        raise UsageError(
            f'{location}: a .json file must contain a list of lengths, or a histogram {{"128": 5000}}.'
        )
