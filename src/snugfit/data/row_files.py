"""Rows in files of text: lines, objects, tables.

Lines are found once, in one pass that also proves the file UTF-8; afterwards only where each line begins is
kept, and a line is read when it is asked for. A table's rows may span lines (a quoted cell may hold one), and
a list's objects too, so those files are held whole; beyond `LARGEST_WHOLE` they must come in another form.
"""

from __future__ import annotations

import csv
import io
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

from snugfit.data.lengths import parsed
from snugfit.data.rows import Row, Table
from snugfit.errors import UsageError

LARGEST_WHOLE = 1 << 30
"""Bytes of a file that is held whole."""

LARGEST_CELL = 64 << 20
"""Characters in a table's cell; csv's own limit, 128 KiB, is less than a long document has."""

_MARK = b"\xef\xbb\xbf"
"""What Windows puts before UTF-8 text."""


class _Lines(Table):
    """A file with a sample in every line that is not blank."""

    def __init__(self, path: Path) -> None:
        self.source, self._path = str(path), path
        self._starts, self._numbers = array("q"), array("q")
        with open(path, "rb") as file:
            start = 0
            for number, line in enumerate(file, start=1):
                _decoded(line, f"{path}, line {number}")
                if line.removeprefix(_MARK if number == 1 else b"").strip():
                    self._starts.append(start)
                    self._numbers.append(number)
                start += len(line)
        self.columns = tuple(self[0]) if len(self) else ()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:
        with open(self._path, "rb") as file:
            file.seek(self._starts[index])
            return self._row(_decoded(file.readline(), self.where(index)), index)

    def __iter__(self) -> Iterator[Row]:
        with open(self._path, "rb") as file:
            for index, start in enumerate(self._starts):
                file.seek(start)
                yield self._row(_decoded(file.readline(), self.where(index)), index)

    def where(self, index: int) -> str:
        """With the line's number, as editors count."""
        return f"{self.source}, line {self._numbers[index]}"

    def home(self, index: int) -> Path:
        """Its file's folder."""
        return self._path.parent

    @abstractmethod
    def _row(self, line: str, index: int) -> Row: ...


@final
class Text(_Lines):
    """`.txt`: a line is a sample."""

    def _row(self, line: str, index: int) -> Row:
        return {"text": line.rstrip("\r\n")}


@final
class Objects(_Lines):
    """`.jsonl`: a line is an object."""

    def _row(self, line: str, index: int) -> Row:
        return _object(parsed(line, self.where(index)), self.where(index))


@final
class Listed(Table):
    """`.json`: a list of objects."""

    def __init__(self, path: Path) -> None:
        self.source, self._home = str(path), path.parent
        values: list[Any] = parsed(_whole(path), str(path))
        self._rows = [_object(value, self.where(index)) for index, value in enumerate(values)]
        self.columns = tuple(self._rows[0]) if self._rows else ()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def home(self, index: int) -> Path:
        """Its file's folder."""
        return self._home


@final
class Cells(Table):
    """`.csv`, `.tsv`: a head, and under it lines with as many cells."""

    def __init__(self, path: Path) -> None:
        self.source, self._home = str(path), path.parent
        self._rows: list[list[str]] = []
        self._numbers = array("q")
        delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        reader = csv.reader(io.StringIO(_whole(path), newline=""), delimiter=delimiter, strict=True)
        before = csv.field_size_limit(LARGEST_CELL)
        try:
            self.columns = _head(next(reader, []), self.source)
            self._fill(reader)
        except csv.Error as error:
            raise UsageError(
                f"{path}, line {reader.line_num}: {error}.{_HINTS.get(str(error), '')}"
            ) from None
        finally:
            csv.field_size_limit(before)

    def _fill(self, reader: Any) -> None:
        number = reader.line_num + 1
        for cells in reader:
            if cells and (len(cells) > 1 or cells[0].strip()):
                if len(cells) != len(self.columns):
                    raise UsageError(
                        f"{self.source}, line {number}: {len(cells)} cells under {len(self.columns)} columns."
                        " A"
                        ' cell that holds a separator is written in quotes: "a, b".'
                    )
                self._rows.append(cells)
                self._numbers.append(number)
            number = reader.line_num + 1

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return dict(zip(self.columns, self._rows[index], strict=True))

    def where(self, index: int) -> str:
        """With the number of the line where the row begins."""
        return f"{self.source}, line {self._numbers[index]}"

    def home(self, index: int) -> Path:
        """Its file's folder."""
        return self._home


_HINTS = {"unexpected end of data": ' A quote (") was opened and never closed.'}


def _json(path: Path) -> Table:
    """A list, or (as `datasets` and pandas write `.json`) an object a line."""
    with open(path, "rb") as file:
        begins = file.read(4096).removeprefix(_MARK).lstrip()[:1]
    if begins == b"[":
        return Listed(path)
    if begins in (b"{", b""):
        return Objects(path)
    raise UsageError(f"{path}: a .json file of samples holds a list of objects, or one object a line.")


READERS: dict[str, Callable[[Path], Table]] = {
    ".txt": Text,
    ".jsonl": Objects,
    ".json": _json,
    ".csv": Cells,
    ".tsv": Cells,
}
"""By the name's end."""


def _head(cells: list[str], source: str) -> tuple[str, ...]:
    heads = tuple(cell.strip() for cell in cells)
    if "" in heads:
        raise UsageError(f"{source}: column {heads.index('') + 1} of the first line has no name.")
    if twice := next((head for head in heads if heads.count(head) > 1), None):
        raise UsageError(f"{source}: two columns are called {twice!r}.")
    return heads


def _object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise UsageError(f'{where}: a sample is an object, {{"text": ...}}, and this is {value!r:.60}.')
    return value


def _whole(path: Path) -> str:
    if (size := path.stat().st_size) > LARGEST_WHOLE:
        raise UsageError(
            f"{path}: {size:,} bytes; a {path.suffix} file is held in memory, so it has at most"
            f" {LARGEST_WHOLE:,}. Write it as .jsonl or .parquet."
        )
    return _decoded(path.read_bytes(), str(path))


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        utf16 = line[:2] in (b"\xff\xfe", b"\xfe\xff")
        what = (
            "this is UTF-16" if utf16 else f"byte {error.start + 1} (0x{line[error.start]:02x}) is no UTF-8"
        )
        before = line[: error.start].count(b"\n")
        line_of = f" in line {before + 1}" if before else ""
        raise UsageError(f"{where}: {what}{line_of}. Save the file as UTF-8.") from None
