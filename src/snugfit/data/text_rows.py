"""Rows of text files: lines, JSON objects and tables, read with Python's own `json` and `csv`.

The readers of `datasets` are not used, because they change the content of a file (as of 5.2):

- JSON: a column of dates written as text (`"2020-01-01"`) becomes timestamps. A key or a value that first
  appears after 10 MB is an error without a line. Missing keys become nulls.
- Tables: pandas reads `NA` and `null` as no value, and fills up a row that has too few cells. If rows have
  one cell more than the head, the first column becomes an index. Here each is an error with its line.
- All of them write a copy of the file to disk at every start.

A file of lines is scanned once, to validate UTF-8 and to record the offset of each line. A line is read on
access. The rows of a table may span lines (a quoted cell may contain one), and so may the objects of a list.
These files are loaded into memory; beyond `LARGEST_IN_MEMORY` they must be in another format.
"""

from __future__ import annotations

import csv
import io
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, final

from snugfit.data.rows import MemoryRows, Row, Rows
from snugfit.errors import UsageError
from snugfit.user_files import load_json

LARGEST_IN_MEMORY = 1 << 30
"""Largest size in bytes of a dataset file that is loaded into memory as a whole."""

LARGEST_CELL = 64 << 20
"""Largest number of characters in a cell of a CSV file. Python's own limit of 128 KiB is too small for long
documents."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Byte order mark, which Windows programs write before UTF-8 text."""


@final
class LineRows(Rows):
    """The rows of a text file with one row per line that is not blank."""

    def __init__(self, path: Path, parse: Callable[[str, str], Row]) -> None:
        """Open the file and find its lines. `parse` converts a line to a row; its second argument is the
        line's location for error messages.
        """
        self.source, self.folder = str(path), path.parent
        self._path, self._parse = path, parse
        self._starts, self._numbers = array("q"), array("q")
        with open(path, "rb") as file:
            start = 0
            for number, line in enumerate(file, start=1):
                decode(line, f"{path}, line {number}")
                if line.removeprefix(_BYTE_ORDER_MARK if number == 1 else b"").strip():
                    self._starts.append(start)
                    self._numbers.append(number)
                start += len(line)
        self.columns = tuple(self[0]) if len(self) else ()

    def __len__(self) -> int:
        return len(self._starts)

    def _item(self, index: int) -> Row:
        return next(self._read([index]))

    def __iter__(self) -> Iterator[Row]:
        return self._read(range(len(self)))

    def _read(self, indices: Iterable[int]) -> Iterator[Row]:
        with open(self._path, "rb") as file:
            for index in indices:
                file.seek(self._starts[index])
                location = self.location(index)
                yield self._parse(decode(file.readline(), location), location)

    def location(self, index: int) -> str:
        """Return the file and the line's number, counted from 1 as in editors."""
        return f"{self.source}, line {self._numbers[index]}"


@final
class TableRows(Rows):
    """A `.csv` or `.tsv` file: a header line, and rows with as many cells. All values are text."""

    same_columns = True

    def __init__(self, path: Path) -> None:
        self.source, self.folder = str(path), path.parent
        self._cells: list[list[str]] = []
        self._numbers = array("q")
        delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        # csv gets unchanged line ends, because quoted cells may contain some.
        reader = csv.reader(io.StringIO(read_text(path), newline=""), delimiter=delimiter, strict=True)
        # csv's limit applies to the whole process, so it is restored below.
        before = csv.field_size_limit(LARGEST_CELL)
        try:
            self.columns = _head(next(reader, []), self.source)
            self._fill(reader)
        except csv.Error as error:
            hint = ' A quote (") was opened and never closed.' if "unexpected end" in str(error) else ""
            raise UsageError(f"{path}, line {reader.line_num}: {error}.{hint}") from None
        finally:
            csv.field_size_limit(before)

    def _fill(self, reader: Any) -> None:
        # A row may span several lines, and `line_num` is the last of them.
        number = reader.line_num + 1
        for cells in reader:
            # csv yields no cell for an empty line, and one for a line of spaces.
            if cells and (len(cells) > 1 or cells[0].strip()):
                if len(cells) != len(self.columns):
                    raise UsageError(
                        f"{self.source}, line {number}: {len(cells)} cells under {len(self.columns)} "
                        'columns. A cell that contains a separator must be in quotes: "a, b".'
                    )
                self._cells.append(cells)
                self._numbers.append(number)
            number = reader.line_num + 1

    def __len__(self) -> int:
        return len(self._cells)

    def _item(self, index: int) -> Row:
        return dict(zip(self.columns, self._cells[index], strict=True))

    def location(self, index: int) -> str:
        """Return the file and the number of the row's first line."""
        return f"{self.source}, line {self._numbers[index]}"


def _head(cells: list[str], source: str) -> tuple[str, ...]:
    heads = tuple(cell.strip() for cell in cells)
    if "" in heads:
        raise UsageError(
            f"{source}: column {heads.index('') + 1} of the first line has no name. Name it there."
        )
    if twice := next((head for head in heads if heads.count(head) > 1), None):
        raise UsageError(f"{source}: two columns are called {twice!r}. Rename one of them.")
    return heads


def _text_row(line: str, location: str) -> Row:
    return {"text": line.rstrip("\r\n")}


def _object_row(line: str, location: str) -> Row:
    return _object(load_json(line, location, constants=True), location)


def _object(value: Any, location: str) -> Row:
    if not isinstance(value, dict):
        raise UsageError(
            f'{location}: a sample must be an object, {{"text": ...}}, but this is {value!r:.60}.'
        )
    return value


def _json(path: Path) -> Rows:
    """Return the rows of a `.json` file: one list of objects, or an object per line, as `datasets` and pandas
    write it.
    """
    with open(path, "rb") as file:
        begins = file.read(4096).removeprefix(_BYTE_ORDER_MARK).lstrip()[:1]
    if begins == b"[":
        values = load_json(read_text(path), str(path), constants=True)
        rows = [_object(value, f"{path}, row {number}") for number, value in enumerate(values, start=1)]
        return MemoryRows(rows, str(path), path.parent)
    # An empty file has no rows, which `read_rows` refuses.
    if begins in (b"{", b""):
        return LineRows(path, _object_row)
    raise UsageError(
        f"{path}: a .json file of samples must contain a list of objects, or one object per line."
    )


READERS: dict[str, Callable[[Path], Rows]] = {
    ".txt": partial(LineRows, parse=_text_row),
    ".jsonl": partial(LineRows, parse=_object_row),
    ".json": _json,
    ".csv": TableRows,
    ".tsv": TableRows,
}
"""Function that opens a dataset file, by the file's suffix."""


def read_text(path: Path) -> str:
    """Read a whole file of UTF-8. Raises `UsageError` if it is too large or has another encoding."""
    if (size := path.stat().st_size) > LARGEST_IN_MEMORY:
        raise UsageError(
            f"{path}: {size:,} bytes; a {path.suffix} file is read into memory, so it may have at most "
            f"{LARGEST_IN_MEMORY:,}. Write it as .jsonl or .parquet."
        )
    return decode(path.read_bytes(), str(path))


def decode(content: bytes, location: str) -> str:
    """Decode UTF-8, without the byte order mark that Windows writes first. Raises `UsageError` for another
    encoding.
    """
    content = content.removeprefix(_BYTE_ORDER_MARK)  # the codec utf-8-sig takes three times as long
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        problem = f"byte {error.start + 1} (0x{content[error.start]:02x}) is not UTF-8"
        if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
            problem = "this is UTF-16"
        before = content[: error.start].count(b"\n")
        line = f" in line {before + 1}" if before else ""
        raise UsageError(f"{location}: {problem}{line}. Save the file as UTF-8.") from None
