"""Several files of rows as one dataset: the rows of the first, then those of the second, and so on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import final

from snugfit.data.row_arrow import Parquet
from snugfit.data.row_files import Cells
from snugfit.data.rows import Row, Table
from snugfit.errors import UsageError


@final
class Shards(Table):
    """Tables of one kind, one behind the other. Those without a row are passed over."""

    def __init__(self, tables: Sequence[Table], source: str) -> None:
        self.source = source
        self._tables = [table for table in tables if len(table)] or [tables[0]]
        first = self._tables[0]
        self.columns = first.columns
        for table in self._tables:
            if isinstance(table, Cells | Parquet) and set(table.columns) != set(first.columns):
                raise UsageError(
                    f"{table.source}: its columns are {', '.join(table.columns)}, and those of"
                    f" {first.source} are {', '.join(first.columns)}. Files that are read as one dataset have"
                    " the same."
                )
        self._ends = list(accumulate(map(len, self._tables)))

    def _at(self, index: int) -> tuple[Table, int]:
        place = bisect_right(self._ends, index)
        return self._tables[place], index - (self._ends[place - 1] if place else 0)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        table, place = self._at(index)
        return table[place]

    def __iter__(self) -> Iterator[Row]:
        for table in self._tables:
            yield from table

    def where(self, index: int) -> str:
        """With the file that the row stands in."""
        table, place = self._at(index)
        return table.where(place)

    def home(self, index: int) -> Path:
        """The folder of the file that the row stands in."""
        table, place = self._at(index)
        return table.home(place)

    def narrowed(self, columns: Collection[str]) -> Table:
        """Each with these columns."""
        return Shards([table.narrowed(columns) for table in self._tables], self.source)
