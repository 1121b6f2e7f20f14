"""Rows of a `datasets.Dataset`, of folders written by its `save_to_disk`, and of Parquet files.

pyarrow reads a Parquet file one row group at a time. The last group stays in memory, because rows are usually
read in order. Columns with random access, such as pictures stored in the file, are loaded into memory as a
dataset. `Dataset.from_parquet` would do both, but it writes an uncompressed copy to disk at every start. A
killed run leaves that copy behind.

Pictures and sound remain encoded until their sample is read.
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
    """The rows of a `datasets.Dataset`, without the format that its user has set."""

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
        except Exception as error:  # errors of arrow and of the decoders
            raise UsageError(
                f"{self.where(index)}: the datasets library cannot read this ({one_line(error)}). "
                "Correct this row, or remove it."
            ) from error
        return row

    def __iter__(self) -> Iterator[Row]:
        return iter(self._dataset)

    def class_names(self, column: str) -> tuple[str, ...]:
        """Return the class names of a column of `ClassLabel`, or of lists of it; empty for any
        other column.
        """
        feature = self._dataset.features.get(column)
        inner = getattr(feature, "feature", feature)
        return tuple(getattr(inner, "names", None) or ())

    def _select(self, columns: Collection[str]) -> Rows:
        """Return the rows with these columns alone, since reading a label must not read a picture."""
        return DatasetRows(self._dataset.select_columns(list(columns)), self.source, self.folder)


def _without_decoding(dataset: Any) -> Any:
    """Return the dataset with pictures and sound left encoded.

    `datasets` decodes the sound of a column with a sampling rate, if torchcodec is installed: it resamples
    the sound to that rate.
    """
    from datasets import config

    for name, feature in dataset.features.items():
        kind = type(feature).__name__
        resampled = kind == "Audio" and config.TORCHCODEC_AVAILABLE and feature.sampling_rate
        if kind in ("Image", "Audio") and feature.decode and not resampled:
            dataset = dataset.cast_column(name, replace(feature, decode=False))
    return dataset


@final
class ParquetRows(Rows):
    """A `.parquet` file, open only during a read: a dataset may have thousands of them."""

    same_columns = True

    def __init__(self, path: Path) -> None:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        self.source, self.folder, self._path = str(path), path.parent, path
        try:
            with ParquetFile(path) as file:
                self._metadata, self.columns = file.metadata, tuple(file.schema_arrow.names)
        except ArrowException as error:
            raise UsageError(
                f"{path}: this is not a Parquet file ({one_line(error)}). Write it again, or correct "
                "the end of its name."
            ) from None
        self._ends = list(accumulate(group.num_rows for group in self._groups()))
        # The cache belongs to this object: one on the method would keep every object alive.
        self._rows_of_group = lru_cache(maxsize=1)(self._read_group)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _item(self, index: int) -> Row:
        group = bisect_right(self._ends, index)
        row: Row = self._rows_of_group(group)[index - (self._ends[group - 1] if group else 0)]
        return row

    def _select(self, columns: Collection[str]) -> Rows:
        """Load these columns into memory for random access; worker processes share that memory.

        Raises `UsageError` if they are larger than `LARGEST_IN_MEMORY`.
        """
        from datasets import Dataset

        parts = (group.column(number) for group in self._groups() for number in range(group.num_columns))
        # A nested column is stored in parts, such as `image.bytes`.
        selected = [part for part in parts if part.path_in_schema.split(".")[0] in columns]
        if (size := sum(part.total_uncompressed_size for part in selected)) > LARGEST_IN_MEMORY:
            raise UsageError(
                f"{self.source}: {show_bytes(size)} in the columns {', '.join(columns)}; images and audio "
                "in a .parquet file are kept in memory, so they may have at most "
                f"{show_bytes(LARGEST_IN_MEMORY)}. A folder of a saved dataset has no limit: "
                "datasets.Dataset.from_parquet(FILES).save_to_disk(FOLDER)."
            )
        content = self._read(lambda file: file.read(columns=list(columns)), "the file")
        fingerprint = "0" * 16  # nothing is cached; a computed fingerprint would be a checksum over all bytes
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
            raise UsageError(
                f"{self.source}: {what} is damaged ({one_line(error)}). Write the file again."
            ) from None


def is_saved_dataset(folder: Path) -> bool:
    """Return True for a folder written by `save_to_disk`."""
    return (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists()


def load_saved(folder: Path) -> Rows:
    """Load the dataset in this folder. If it has several splits, load the one named `train`.

    Raises `UsageError` if the folder cannot be loaded or has no such split.
    """
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # json, arrow and the file system raise errors of their own
        raise UsageError(
            f"{folder}: the datasets library cannot load this ({one_line(error)}). Save it again with "
            "save_to_disk."
        ) from None
    if not isinstance(loaded, datasets.DatasetDict):
        return DatasetRows(loaded, str(folder))
    names = [str(name) for name in loaded]
    chosen = names[0] if len(names) == 1 else "train"
    if chosen not in names:
        cure = f" Give the folder of one split: {folder / names[0]}." if names else ""
        raise UsageError(
            f"{folder}: this folder has no split 'train', but {', '.join(names) or 'none'}.{cure}"
        )
    return DatasetRows(loaded[chosen], f"{folder} ({chosen})")
