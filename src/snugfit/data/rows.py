"""The rows of a dataset, as a sequence of mappings from a column's name to a value.

| source                                  | a row is                                   | read              |
|-----------------------------------------|--------------------------------------------|-------------------|
| `.txt`                                  | a line, as `text`; blank lines are skipped | on access         |
| `.jsonl`, `.json` that begins with `{`  | an object, one a line                      | on access         |
| `.json` that begins with `[`            | an object of the list                      | at once           |
| `.csv`, `.tsv`                          | a line under a head                        | at once           |
| `.parquet`                              | a row                                      | a group at a time |
| several of these: a folder, a pattern   | theirs, file after file                    | as above          |
| a folder written by `save_to_disk`      | a row                                      | on access         |
| a list of mappings, a `datasets.Dataset`| an entry                                   | on access         |

This file has the interface of all sources, and the two sources without a file. The others are in
`text_rows.py`, `row_sources.py` and in features. `row_sources.py` also chooses one for a path. An error in a
file names its line. It is raised when the file is opened, or when the row is read on access.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, final

from snugfit.data.indexed import ComputedSequence
from snugfit.errors import UsageError, did_you_mean, nearest
from snugfit.techniques.registry import features

Row = Mapping[str, Any]

ROLES = (
    "text",
    "text_pair",
    "label",
    "tokens",
    "labels",
    "source",
    "target",
    "prompt",
    "completion",
    "input_ids",
    "messages",
)
"""Roles of columns in training samples, which a user may assign to columns by name; `columns.py` has those of
each task."""


class Rows(ComputedSequence[Row]):
    """Base class of a dataset's rows, with the columns that the user has named; one subclass for each type of
    source.
    """

    source: str
    """Path of the dataset's file or folder, as the user gave it."""

    columns: tuple[str, ...]
    """The names of the first row's columns."""

    folder: Path = Path()
    """The folder that relative paths in a row start from: that of the file, if there is one."""

    same_columns: bool = False
    """True if every row has every column. A dataset of several files then needs equal columns in all of them.
    """

    named: Mapping[str, str] = {}
    """Columns that the user assigned, by role (`text`, `label`, ...)."""

    def __iter__(self) -> Iterator[Row]:
        return (self._item(index) for index in range(len(self)))

    def location(self, index: int) -> str:
        """Return the location of a row for an error message: file and line, or the row's number."""
        return f"{self.source}, row {index + 1}"

    def folder_of(self, index: int) -> Path:
        """Return the folder to which file names in this row are relative."""
        return self.folder

    def class_names(self, column: str) -> tuple[str, ...]:
        """Return the names of a column's classes in order; empty if the source has none."""
        return ()

    def notes(self) -> Iterator[str]:
        """Yield messages about these rows for the user before training, such as columns that are ignored."""
        yield from ()

    def select_columns(self, columns: Collection[str]) -> Rows:
        """Return the rows with at least these columns. Other columns are left out if that saves
        reading them.
        """
        return self._select({name if name in self.columns else _outer(name) for name in columns})

    def _select(self, columns: Collection[str]) -> Rows:
        return self

    def name_columns(self, named: Mapping[str, str]) -> None:
        """Store the columns that the user chose, by role (such as text or label). Raises `UsageError` for an
        unknown role or column.
        """
        roles = (*ROLES, *(role for feature in features() for role in feature.column_roles))
        for role, column in named.items():
            if role not in roles:
                raise UsageError(
                    f"columns: {role!r} is not a role of a column.{did_you_mean(role, roles)} Roles: "
                    f"{', '.join(roles)}."
                )
            if not isinstance(column, str) or not self.has(column):
                raise UsageError(
                    f"{self.source}: no column {column!r}. {self.column_list(str(column))} Name one of them."
                )
        self.named = dict(named)

    def has(self, column: str) -> bool:
        """Return True if this column exists. `translation.en` is the key `en` in the objects of
        `translation`."""
        return column in self.columns or _outer(column) in self.columns

    def column_list(self, column: str = "") -> str:
        """Return the list of columns for an error message, those most like `column` first."""
        near = nearest(column, self.columns)
        names = [*near, *(name for name in self.columns if name not in near)]
        return f"Its columns: {', '.join(map(repr, names[:20]))}{', ...' if len(names) > 20 else ''}."

    def value(self, row: Row, column: str, index: int) -> Any:
        """Return the row's value in this column. Raises `UsageError` if the row lacks it."""
        value: Any = row
        # The column's own name may contain a dot, so the whole name is tried first.
        for key in [column] if column in row else column.split("."):
            if not isinstance(value, Mapping) or key not in value:
                raise UsageError(
                    f"{self.location(index)}: it has no {column!r}, but other rows do. Add it, or remove "
                    "the row."
                )
            value = value[key]
        return value

    def text(self, row: Row, column: str, index: int) -> str:
        """Return the row's text in this column. Raises `UsageError` if there is none."""
        return as_text(self.value(row, column, index), self.location(index), column)


def as_text(value: Any, location: str, column: str) -> str:
    """Return the value if it is valid text for a tokenizer. Raises `UsageError` otherwise."""
    if not isinstance(value, str):
        shown = "nothing (null)" if value is None else f"{value!r:.40}"
        raise UsageError(f"{location}: {column!r} is {shown}; it must be text in every row.")
    # ASCII is always valid text, and the check for it is nearly free.
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{location}: character {error.start + 1} of {column!r} is half of a surrogate pair, which "
                "is not valid text. Correct this row, or remove it."
            ) from None
    return value


def _outer(column: str) -> str:
    return column.split(".", maxsplit=1)[0]


@final
class MemoryRows(Rows):
    """Rows in memory: a list of mappings, or a map-style dataset of torch."""

    def __init__(self, rows: Sequence[Row], source: str = "the dataset", folder: Path = Path()) -> None:
        self.source, self.folder, self._rows = source, folder, rows
        try:
            first = rows[0] if len(rows) else {}
        except LookupError:  # a table that is indexed by columns, such as pandas'
            first = None
        if not isinstance(first, Mapping):
            raise UsageError(
                f"The rows of a dataset must be mappings, {{'text': ...}}; the first is {first!r:.60}."
            )
        self.columns = tuple(first)

    def __len__(self) -> int:
        return len(self._rows)

    def _item(self, index: int) -> Row:
        return self._rows[index]


@final
class JoinedRows(Rows):
    """Several files of one format, concatenated to one dataset. Files without a row are left out."""

    def __init__(self, parts: Sequence[Rows], source: str) -> None:
        self.source = source
        # If all parts are empty, the first one is kept for its columns.
        self._parts = [part for part in parts if len(part)] or [parts[0]]
        first = self._parts[0]
        self.columns = first.columns
        for part in self._parts:
            if part.same_columns and set(part.columns) != set(first.columns):
                raise UsageError(
                    f"{part.source}: its columns are {', '.join(part.columns)}, but those of "
                    f"{first.source} are {', '.join(first.columns)}. Files of one dataset must have the "
                    "same columns."
                )
        self._ends = list(accumulate(map(len, self._parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def _at(self, index: int) -> tuple[Rows, int]:
        """Return the file that contains the row of this index, and the row's index in that file."""
        number = bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)

    def _item(self, index: int) -> Row:
        part, inner = self._at(index)
        return part[inner]

    def __iter__(self) -> Iterator[Row]:
        for part in self._parts:
            yield from part

    def location(self, index: int) -> str:
        """Return the row's own file and its location in it, for an error message."""
        part, inner = self._at(index)
        return part.location(inner)

    def folder_of(self, index: int) -> Path:
        """Return the folder of the row's file."""
        part, inner = self._at(index)
        return part.folder_of(inner)

    def _select(self, columns: Collection[str]) -> Rows:
        return JoinedRows([part.select_columns(columns) for part in self._parts], self.source)
