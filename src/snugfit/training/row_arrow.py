"""Rows in Parquet files, and in folders that `datasets.save_to_disk` wrote. Both need the extra `data`.

A Parquet file is read a row group at a time, and the last one is kept, for rows are asked for in order.
"""

from __future__ import annotations

import importlib
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, final

from snugfit.errors import UsageError, did_you_mean
from snugfit.training.rows import FORMS, Row, Table


@final
class Parquet(Table):
    """A `.parquet` file."""

    def __init__(self, path: Path) -> None:
        self.source = str(path)
        parquet = _package("pyarrow.parquet", self.source)
        try:
            self._file = parquet.ParquetFile(path)
        except importlib.import_module("pyarrow").ArrowException as error:
            raise UsageError(f"{path}: this is no Parquet file ({_line(error)}).") from None
        self.columns = tuple(self._file.schema_arrow.names)
        groups = range(self._file.num_row_groups)
        sizes = (self._file.metadata.row_group(group).num_rows for group in groups)
        self._ends = list(accumulate(sizes))
        self._group = lru_cache(maxsize=1)(self._read)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Row:
        group = bisect_right(self._ends, index)
        row: Row = self._group(group)[index - (self._ends[group - 1] if group else 0)]
        return row

    def _read(self, group: int) -> list[Row]:
        try:
            rows: list[Row] = self._file.read_row_group(group).to_pylist()
        except importlib.import_module("pyarrow").ArrowException as error:
            raise UsageError(f"{self.source}: row group {group + 1} is damaged ({_line(error)}).") from None
        return rows


@final
class Saved(Table):
    """A `datasets.Dataset`, whatever format it was given for its user."""

    def __init__(self, dataset: Any, source: str) -> None:
        if not hasattr(dataset, "__len__"):
            raise UsageError(
                f"{source}: it is streamed and has no length. Load it without streaming=True, or"
                " save it first."
            )
        self.source, self._rows = source, dataset.with_format(None)
        self.columns = tuple(dataset.column_names)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        row: Row = self._rows[index]
        return row

    def __iter__(self) -> Any:
        return iter(self._rows)

    def class_names(self, column: str) -> tuple[str, ...]:
        """Of a `ClassLabel`, or of a list of them."""
        feature = self._rows.features.get(column)
        inner = getattr(feature, "feature", feature)
        return tuple(getattr(inner, "names", None) or ())


def saved(folder: Path, split: str | None) -> Saved:
    """The dataset in this folder; of several splits `train`, unless another is named."""
    if not (folder / "dataset_info.json").exists() and not (folder / "dataset_dict.json").exists():
        raise UsageError(f"{folder}: this folder holds no dataset that save_to_disk wrote.{_files(folder)}")
    datasets = _package("datasets", str(folder))
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:  # json, arrow and the file system each have their own
        raise UsageError(f"{folder}: datasets cannot load this ({_line(error)}).") from None
    if not isinstance(found, datasets.DatasetDict):
        if split is not None:
            raise UsageError(f"{folder}: this dataset has no splits. Leave split={split!r} out.")
        return Saved(found, str(folder))
    names = [str(name) for name in found]
    chosen = split or (names[0] if len(names) == 1 else "train")
    if chosen not in names:
        said = f"no split {chosen!r}.{did_you_mean(chosen, names)}" if split else "which split?"
        raise UsageError(f"{folder}: {said} It has {', '.join(names) or 'none'}: split='NAME'.")
    return Saved(found[chosen], f"{folder} ({chosen})")


def _files(folder: Path) -> str:
    within = sorted(str(each) for each in folder.glob("*") if each.suffix.lower() in FORMS)
    return f" Give one of its files: {', '.join(within[:5])}." if within else ""


def _package(name: str, source: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        needed = name.split(".", maxsplit=1)[0]
        raise UsageError(
            f'{source}: reading it needs {needed}, which is not installed. Try: pip install "snugfit[data]"'
        ) from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
