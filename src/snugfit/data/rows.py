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
| a folder of folders of pictures         | a picture, and its folder's name           | when asked for    |
| a list of mappings, a `datasets.Dataset`| an entry                                   | when asked for    |

Where a path leads is found in `row_sources.py`. Parquet and saved datasets need the extra `data`. What is
wrong with a file is told with its line, when the file is opened or, where rows are read when they are asked
for, when the row is read.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, final

from snugfit.errors import UsageError, did_you_mean, nearest

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
    "image",
    "audio",
)
"""What a column can be to a task; `columns.py` says which task needs which."""


class Table(ABC):
    """What a reader of one kind of file offers."""

    source: str
    """The file or folder, as it was named."""

    columns: tuple[str, ...]
    """Of the first row."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Row: ...

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def where(self, index: int) -> str:
        """Where a person finds this row."""
        return f"{self.source}, row {index + 1}"

    def class_names(self, column: str) -> tuple[str, ...]:
        """The names of a column's classes, where the file knows them."""
        return ()

    def home(self, index: int) -> Path:
        """The folder in which a relative path of this row begins: that of its file, where there is one."""
        return Path()

    def narrowed(self, columns: Collection[str]) -> Table:
        """The same rows with these columns at least; without the others where that saves reading them."""
        return self

    def notes(self) -> Iterator[str]:
        """What somebody who trains on this should be told."""
        yield from ()


@final
class Rows(Sequence[Row]):
    """A dataset's rows, and which of its columns the user has named for what."""

    def __init__(self, table: Table, asked: Mapping[str, str] | None = None) -> None:
        if asked is not None and not isinstance(asked, Mapping):
            raise UsageError(f'columns is {asked!r:.60}; it is a mapping: columns={{"text": "review"}}.')
        self.table, self.asked = table, dict(asked or {})
        if not len(table):
            raise UsageError(f"{table.source}: this dataset is empty; training needs at least one sample.")
        for role, column in self.asked.items():
            if role not in ROLES:
                raise UsageError(
                    f"columns: {role!r} is nothing that a column can be.{did_you_mean(role, ROLES)} It is one"
                    f" of {', '.join(ROLES)}."
                )
            if not isinstance(column, str) or not self.has(column):
                raise UsageError(f"{self.source}: no column {column!r}. {self.listed(str(column))}")

    @property
    def source(self) -> str:
        """Where they come from."""
        return self.table.source

    @property
    def columns(self) -> tuple[str, ...]:
        """Their names."""
        return self.table.columns

    def has(self, column: str) -> bool:
        """Whether there is such a column; `translation.en` is the key `en` in the objects of
        `translation`."""
        return column in self.columns or column.split(".", maxsplit=1)[0] in self.columns

    def listed(self, column: str = "") -> str:
        """The columns there are, in words, those most like `column` first."""
        near = nearest(column, self.columns)
        names = [*near, *(name for name in self.columns if name not in near)]
        return f"Its columns: {', '.join(map(repr, names[:20]))}{', ...' if len(names) > 20 else ''}."

    def narrowed(self, columns: Collection[str]) -> Rows:
        """The same rows with these columns at least."""
        whole = {name if name in self.columns else name.split(".", maxsplit=1)[0] for name in columns}
        return Rows(self.table.narrowed(whole))

    def value(self, row: Row, column: str, index: int) -> Any:
        """What stands in a row under this name; raises `UsageError` when nothing does."""
        found: Any = row
        for key in [column] if column in row else column.split("."):
            if not isinstance(found, Mapping) or key not in found:
                raise UsageError(f"{self.where(index)}: it has no {column!r}, which other rows have.")
            found = found[key]
        return found

    def where(self, index: int) -> str:
        """Where a person finds this row."""
        return self.table.where(index)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self.table[each] for each in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.table[index % len(self)]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.table)


@final
class _Given(Table):
    """Rows that are in Python already."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.source, self._rows = "the dataset", rows
        try:
            first = rows[0] if len(rows) else {}
        except LookupError:  # a table by columns, such as pandas'
            first = None
        if not isinstance(first, Mapping):
            raise UsageError(f"A dataset's rows are mappings, {{'text': ...}}; the first is {first!r:.60}.")
        self.columns = tuple(first)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]


def read_rows(
    source: str | os.PathLike[str] | Sequence[Row],
    *,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
) -> Rows:
    """The rows of a file, of several (a folder, or a pattern such as `data/*.jsonl`), of a folder that
    `save_to_disk` wrote, of a folder of pictures, or of a sequence of mappings.

    `columns` names the column of a role where it is not called as usual: `{"text": "review"}`. `split` is the
    part of a saved dataset that has several; `train` unless another is named.
    """
    if not isinstance(source, str | os.PathLike):
        return Rows(_given(source), columns)
    from snugfit.data.row_sources import table_at

    return Rows(table_at(Path(source).expanduser(), split), columns)


def _given(rows: object) -> Table:
    if hasattr(rows, "features") and hasattr(rows, "with_format"):
        from snugfit.data.row_arrow import Saved

        return Saved(rows, "the dataset")
    if isinstance(rows, Mapping):
        hint = f"[{next(iter(rows))!r}]" if rows else ""
        raise UsageError(f"A dataset is a sequence of rows, not a mapping. Take one of its splits: {hint}.")
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise UsageError(
            "A dataset is a path, a list of mappings or a datasets.Dataset, not of type"
            f" {type(rows).__name__}."
        )
    return _Given(cast("Sequence[Row]", rows))
