"""The rows of a dataset, as they lie on disk: a sequence of mappings from a column's name to a value.

| source                                  | a row is                                   | read              |
|-----------------------------------------|--------------------------------------------|-------------------|
| `.txt`                                  | a line, as `text`; blank lines are skipped | when asked for    |
| `.jsonl`, `.json` that begins with `{`  | an object, one a line                      | when asked for    |
| `.json` that begins with `[`            | an object of the list                      | at once           |
| `.csv`, `.tsv`                          | a line under a head                        | at once           |
| `.parquet`                              | a row                                      | a group at a time |
| several of these: a folder, a pattern   | theirs, file after file                    | as above          |
| a folder written by `save_to_disk`      | a row                                      | when asked for    |
| a list of mappings, a `datasets.Dataset`| an entry                                   | when asked for    |

What all of them offer stands here, and the two kinds that read no file. The others are in `text_rows.py`,
`arrow_rows.py` and in features; `row_sources.py` decides which of them a path leads to. What is
wrong with a file is reported with its line: when the file is opened or, where rows are read when they are
asked for, when the row is read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, final

from snugfit.data.indexed import Indexed
from snugfit.errors import UsageError, did_you_mean, nearest
from snugfit.techniques.feature import features

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
"""What a column can be to a task, beside the roles of features; `columns.py` says which task needs which."""


class Rows(Indexed[Row]):
    """A dataset's rows, and the columns that the user has named; one subclass for each kind of source."""

    source: str
    """The file or folder, as it was named."""

    columns: tuple[str, ...]
    """The names of the first row's columns."""

    folder: Path = Path()
    """Where a relative path in a row begins: the folder of the file, where there is one."""

    same_columns: bool = False
    """Whether every row has every column, so that files which are read as one dataset must agree."""

    named: Mapping[str, str] = {}
    """The column of a role, where the user has named it."""

    def __iter__(self) -> Iterator[Row]:
        return (self._item(index) for index in range(len(self)))

    def where(self, index: int) -> str:
        """The file and line, or the row's number, by which a person finds this row."""
        return f"{self.source}, row {index + 1}"

    def folder_of(self, index: int) -> Path:
        """The folder in which a relative path of this row begins."""
        return self.folder

    def class_names(self, column: str) -> tuple[str, ...]:
        """The names of a column's classes in their order, where the source knows them; else none."""
        return ()

    def notes(self) -> Iterator[str]:
        """What somebody who trains on this should know."""
        yield from ()

    def select_columns(self, columns: Collection[str]) -> Rows:
        """The same rows with these columns at least; without the others where that saves reading them."""
        return self._select({name if name in self.columns else _outer(name) for name in columns})

    def _select(self, columns: Collection[str]) -> Rows:
        return self

    def name_columns(self, named: Mapping[str, str]) -> None:
        """Notes which column the user has named for which role. Raises `UsageError`."""
        roles = (*ROLES, *(role for feature in features() for role in feature.column_roles))
        for role, column in named.items():
            if role not in roles:
                raise UsageError(
                    f"columns: {role!r} is not a role of a column.{did_you_mean(role, roles)} Roles: "
                    f"{', '.join(roles)}."
                )
            if not isinstance(column, str) or not self.has(column):
                raise UsageError(f"{self.source}: no column {column!r}. {self.column_list(str(column))}")
        self.named = dict(named)

    def has(self, column: str) -> bool:
        """Whether there is such a column; `translation.en` is the key `en` in the objects of
        `translation`."""
        return column in self.columns or _outer(column) in self.columns

    def column_list(self, column: str = "") -> str:
        """The columns there are, for an error message; those most like `column` come first."""
        near = nearest(column, self.columns)
        names = [*near, *(name for name in self.columns if name not in near)]
        return f"Its columns: {', '.join(map(repr, names[:20]))}{', ...' if len(names) > 20 else ''}."

    def value(self, row: Row, column: str, index: int) -> Any:
        """What a row has in this column; raises `UsageError` when it has no such column."""
        value: Any = row
        for key in [column] if column in row else column.split("."):
            if not isinstance(value, Mapping) or key not in value:
                raise UsageError(f"{self.where(index)}: it has no {column!r}, but other rows do.")
            value = value[key]
        return value

    def text(self, row: Row, column: str, index: int) -> str:
        """The text that a row has in this column. Raises `UsageError` where there is none."""
        return as_text(self.value(row, column, index), self.where(index), column)


def as_text(value: Any, where: str, column: str) -> str:
    """The value, if it is text that a tokenizer can read."""
    if not isinstance(value, str):
        what = "nothing (null)" if value is None else f"{value!r:.40}"
        raise UsageError(f"{where}: {column!r} is {what}; it must be text in every row.")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{where}: character {error.start + 1} of {column!r} is half of a surrogate pair, which is "
                "not valid text."
            ) from None
    return value


def _outer(column: str) -> str:
    return column.split(".", maxsplit=1)[0]


@final
class MemoryRows(Rows):
    """Rows that are in memory already: a list of mappings, or a map-style dataset of torch."""

    def __init__(self, rows: Sequence[Row], source: str = "the dataset", folder: Path = Path()) -> None:
        self.source, self.folder, self._rows = source, folder, rows
        try:
            first = rows[0] if len(rows) else {}
        except LookupError:  # a table by columns, such as pandas'
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
    """Several files of one kind as one dataset: the rows of the first, then those of the second, and so on.
    Files without a row are left out."""

    def __init__(self, parts: Sequence[Rows], source: str) -> None:
        self.source = source
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
        """The file that holds this row, and the row's index in that file."""
        number = bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)

    def _item(self, index: int) -> Row:
        part, inner = self._at(index)
        return part[inner]

    def __iter__(self) -> Iterator[Row]:
        for part in self._parts:
            yield from part

    def where(self, index: int) -> str:
        """The row's own file, and where it is in that."""
        part, inner = self._at(index)
        return part.where(inner)

    def folder_of(self, index: int) -> Path:
        """The folder of the file that holds this row."""
        part, inner = self._at(index)
        return part.folder_of(inner)

    def _select(self, columns: Collection[str]) -> Rows:
        return JoinedRows([part.select_columns(columns) for part in self._parts], self.source)
