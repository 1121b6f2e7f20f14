"""Rows in Parquet files, and in folders that `datasets.save_to_disk` wrote. Both need the extra `data`.

A Parquet file is read a row group at a time, and the last one is kept, for rows are asked for in order. Where
they are not, as with pictures that lie in it, its columns are held whole. Pictures and sound stay as they lie
on disk until a sample is asked for.
"""

from __future__ import annotations

import importlib
from bisect import bisect_right
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, final

from snugfit.data.row_files import LARGEST_WHOLE
from snugfit.data.rows import Row, Table
from snugfit.errors import UsageError, did_you_mean
from snugfit.units import show_bytes


@final
class Parquet(Table):
    """A `.parquet` file. It is open only while it is read: a dataset may have thousands of them."""

    def __init__(self, path: Path) -> None:
        self.source, self._path = str(path), path
        parquet = _package("pyarrow.parquet", self.source)
        try:
            with parquet.ParquetFile(path) as file:
                self._metadata, self.columns = file.metadata, tuple(file.schema_arrow.names)
        except importlib.import_module("pyarrow").ArrowException as error:
            raise UsageError(f"{path}: this is no Parquet file ({_line(error)}).") from None
        groups = map(self._metadata.row_group, range(self._metadata.num_row_groups))
        self._ends = list(accumulate(group.num_rows for group in groups))
        self._group = lru_cache(maxsize=1)(self._read)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Row:
        group = bisect_right(self._ends, index)
        row: Row = self._group(group)[index - (self._ends[group - 1] if group else 0)]
        return row

    def home(self, index: int) -> Path:
        """Its file's folder."""
        return self._path.parent

    def narrowed(self, columns: Collection[str]) -> Table:
        """These columns, held whole, so that any row can be had at once."""
        groups = map(self._metadata.row_group, range(self._metadata.num_row_groups))
        parts = (group.column(number) for group in groups for number in range(group.num_columns))
        named = [part for part in parts if part.path_in_schema.split(".")[0] in columns]
        if (size := sum(part.total_uncompressed_size for part in named)) > LARGEST_WHOLE:
            raise UsageError(
                f"{self.source}: {show_bytes(size)} in the columns {', '.join(columns)}; pictures and sound"
                f" in a .parquet file are held in memory, so they have at most {show_bytes(LARGEST_WHOLE)}. A"
                " folder has no limit: datasets.Dataset.from_parquet(FILES).save_to_disk(FOLDER)."
            )
        content = self._taken(lambda file: file.read(columns=list(columns)), "the file")
        return Held(content, self.source, self._path.parent)

    def _read(self, group: int) -> list[Row]:
        rows: list[Row] = self._taken(
            lambda file: file.read_row_group(group).to_pylist(), f"row group {group + 1}"
        )
        return rows

    def _taken(self, read: Callable[[Any], Any], what: str) -> Any:
        try:
            with _package("pyarrow.parquet", self.source).ParquetFile(
                self._path, metadata=self._metadata
            ) as file:
                return read(file)
        except importlib.import_module("pyarrow").ArrowException as error:
            raise UsageError(f"{self.source}: {what} is damaged ({_line(error)}).") from None


@final
class Held(Table):
    """Some columns of a Parquet file, in memory; worker processes share them with their parent."""

    def __init__(self, content: Any, source: str, home: Path) -> None:
        self.source, self._content, self._home = source, content, home
        self.columns = tuple(content.column_names)

    def __len__(self) -> int:
        return int(self._content.num_rows)

    def __getitem__(self, index: int) -> Row:
        row: Row = self._content.slice(index, 1).to_pylist()[0]
        return row

    def home(self, index: int) -> Path:
        """Its file's folder."""
        return self._home


@final
class Saved(Table):
    """A `datasets.Dataset`, whatever format it was given for its user."""

    def __init__(self, dataset: Any, source: str) -> None:
        if not hasattr(dataset, "__len__"):
            raise UsageError(
                f"{source}: it is streamed and has no length. Load it without streaming=True, or"
                " save it first."
            )
        self.source, self._rows = source, _encoded(dataset.with_format(None))
        self.columns = tuple(dataset.column_names)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        try:
            row: Row = self._rows[index]
        except Exception as error:  # arrow's, and those of whatever decodes
            raise UsageError(f"{self.where(index)}: datasets cannot read this ({_line(error)}).") from error
        return row

    def __iter__(self) -> Any:
        return iter(self._rows)

    def class_names(self, column: str) -> tuple[str, ...]:
        """Of a `ClassLabel`, or of a list of them."""
        feature = self._rows.features.get(column)
        inner = getattr(feature, "feature", feature)
        return tuple(getattr(inner, "names", None) or ())

    def narrowed(self, columns: Collection[str]) -> Table:
        """These columns alone: a picture is not read where a label is wanted."""
        return Saved(self._rows.select_columns(list(columns)), self.source)


def _encoded(dataset: Any) -> Any:
    """The dataset with pictures and sound as they lie on disk. Sound of a column that names a sampling rate
    is left to `datasets` where it can hear (torchcodec), for it brings it to that rate."""
    hears = _package("datasets", "the dataset").config.TORCHCODEC_AVAILABLE
    for name, feature in dataset.features.items():
        kind = type(feature).__name__
        resampled = kind == "Audio" and hears and feature.sampling_rate
        if kind in ("Image", "Audio") and feature.decode and not resampled:
            dataset = dataset.cast_column(name, replace(feature, decode=False))
    return dataset


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists()


def saved(folder: Path, split: str | None) -> Saved:
    """The dataset in this folder; of several splits `train`, unless another is named."""
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
