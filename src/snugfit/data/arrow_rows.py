"""Rows of a `datasets.Dataset`, in folders that its `save_to_disk` wrote, and in Parquet files.

A Parquet file is read a row group at a time, by pyarrow, and the last group is kept, for rows are asked for
in order. Where they are not, as with pictures that lie in it, its columns are held in memory as a dataset.
`Dataset.from_parquet` would do both, but writes an uncompressed copy to disk at every start, and a run that
is killed leaves that copy behind.

Pictures and sound stay as they lie on disk until a sample is asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, final

from snugfit.data.rows import Row, Rows
from snugfit.data.text_rows import LARGEST_IN_MEMORY
from snugfit.errors import UsageError, one_line
from snugfit.units import show_bytes


@final
class DatasetRows(Rows):
    """A `datasets.Dataset`, whatever format it was given for its user."""

    def __init__(self, dataset: Any, source: str, folder: Path = Path()) -> None:
        if not hasattr(dataset, "__len__"):
            raise UsageError(
                f"{source}: a streamed dataset has no length. Load it without streaming=True, or save it "
                "first."
            )
        self.source, self.folder = source, folder
        self._dataset = _without_decoding(dataset.with_format(None))
        self.columns = tuple(dataset.column_names)

    def __len__(self) -> int:
        return len(self._dataset)

    def _item(self, index: int) -> Row:
        try:
            row: Row = self._dataset[index]
        except Exception as error:  # arrow's, and those of whatever decodes
            raise UsageError(
                f"{self.where(index)}: the datasets library cannot read this ({one_line(error)})."
            ) from error
        return row

    def __iter__(self) -> Iterator[Row]:
        return iter(self._dataset)

    def class_names(self, column: str) -> tuple[str, ...]:
        """The names in a `ClassLabel`, or in a list of them."""
        feature = self._dataset.features.get(column)
        inner = getattr(feature, "feature", feature)
        return tuple(getattr(inner, "names", None) or ())

    def _select(self, columns: Collection[str]) -> Rows:
        """These columns alone: a picture is not read where a label is asked for."""
        return DatasetRows(self._dataset.select_columns(list(columns)), self.source, self.folder)


def _without_decoding(dataset: Any) -> Any:
    """The dataset with pictures and sound as they lie on disk. Sound of a column that names a sampling rate
    is left to `datasets` where it can decode it (torchcodec), for it brings it to that rate."""
    from datasets import config

    for name, feature in dataset.features.items():
        kind = type(feature).__name__
        resampled = kind == "Audio" and config.TORCHCODEC_AVAILABLE and feature.sampling_rate
        if kind in ("Image", "Audio") and feature.decode and not resampled:
            dataset = dataset.cast_column(name, replace(feature, decode=False))
    return dataset


@final
class ParquetRows(Rows):
    """A `.parquet` file. It is open only while it is read: a dataset may have thousands of them."""

    same_columns = True

    def __init__(self, path: Path) -> None:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        self.source, self.folder, self._path = str(path), path.parent, path
        try:
            with ParquetFile(path) as file:
                self._metadata, self.columns = file.metadata, tuple(file.schema_arrow.names)
        except ArrowException as error:
            raise UsageError(f"{path}: this is not a Parquet file ({one_line(error)}).") from None
        self._ends = list(accumulate(group.num_rows for group in self._groups()))
        self._rows_of_group = lru_cache(maxsize=1)(self._read_group)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _item(self, index: int) -> Row:
        group = bisect_right(self._ends, index)
        row: Row = self._rows_of_group(group)[index - (self._ends[group - 1] if group else 0)]
        return row

    def _select(self, columns: Collection[str]) -> Rows:
        """These columns in memory, so that any row can be had at once; worker processes share them."""
        from datasets import Dataset

        parts = (group.column(number) for group in self._groups() for number in range(group.num_columns))
        selected = [part for part in parts if part.path_in_schema.split(".")[0] in columns]
        if (size := sum(part.total_uncompressed_size for part in selected)) > LARGEST_IN_MEMORY:
            raise UsageError(
                f"{self.source}: {show_bytes(size)} in the columns {', '.join(columns)}; images and audio "
                "in a .parquet file are kept in memory, so they may have at most "
                f"{show_bytes(LARGEST_IN_MEMORY)}. A folder of a saved dataset has no limit: "
                "datasets.Dataset.from_parquet(FILES).save_to_disk(FOLDER)."
            )
        content = self._read(lambda file: file.read(columns=list(columns)), "the file")
        fingerprint = "0" * 16  # nothing is cached, and one of its own would be a checksum over all bytes
        return DatasetRows(Dataset(content, fingerprint=fingerprint), self.source, self.folder)

    def _groups(self) -> Iterator[Any]:
        return map(self._metadata.row_group, range(self._metadata.num_row_groups))

    def _read_group(self, group: int) -> list[Row]:
        rows: list[Row] = self._read(
            lambda file: file.read_row_group(group).to_pylist(), f"row group {group + 1}"
        )
        return rows

    def _read(self, read: Callable[[Any], Any], what: str) -> Any:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        try:
            with ParquetFile(self._path, metadata=self._metadata) as file:
                return read(file)
        except ArrowException as error:
            raise UsageError(f"{self.source}: {what} is damaged ({one_line(error)}).") from None


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists()


def load_saved(folder: Path) -> Rows:
    """The dataset in this folder; of several splits `train`. Each split is a folder of its own in there."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # json, arrow and the file system each have their own
        raise UsageError(f"{folder}: the datasets library cannot load this ({one_line(error)}).") from None
    if not isinstance(loaded, datasets.DatasetDict):
        return DatasetRows(loaded, str(folder))
    names = [str(name) for name in loaded]
    chosen = names[0] if len(names) == 1 else "train"
    if chosen not in names:
        cure = f" Give the folder of one split: {folder / names[0]}." if names else ""
        raise UsageError(f"{folder}: which split? It has {', '.join(names) or 'none'}.{cure}")
    return DatasetRows(loaded[chosen], f"{folder} ({chosen})")
