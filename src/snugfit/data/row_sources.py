"""Selection of the class that reads a dataset's path: a file of rows, several files, or a folder of samples.

| path            | rows                                                                            |
|-----------------|---------------------------------------------------------------------------------|
| `reviews.jsonl` | its rows; the suffix decides the format                                         |
| `data/*.jsonl`  | the rows of every file that matches the pattern                                 |
| `data`          | a folder: a dataset of `save_to_disk`; else every file of rows in it; else      |
|                 | samples that a feature reads from folders of their classes                      |

Several files are one dataset in the order of their names, so sample 70,000 is the same one at every start.
Files of several kinds are not mixed. A folder with both `train-...` and `test-...` is an error: a mistake
must not train on test data.

**Arrow.** Rows of a `datasets.Dataset`, of folders written by its `save_to_disk`, and of Parquet files.

pyarrow reads a Parquet file one row group at a time. The last group stays in memory, because rows are usually
read in order. Columns with random access, such as pictures stored in the file, are loaded into memory as a
dataset. `Dataset.from_parquet` would do both, but it writes an uncompressed copy to disk at every start. A
killed run leaves that copy behind.

Pictures and sound remain encoded until their sample is read.
"""

from __future__ import annotations

import glob
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, cast, final

from snugfit.data.rows import JoinedRows, MemoryRows, Row, Rows
from snugfit.data.text_rows import LARGEST_IN_MEMORY, READERS
from snugfit.errors import UsageError, did_you_mean, one_line, require_packages
from snugfit.techniques.registry import hooks
from snugfit.units import show_bytes
from snugfit.user_files import refuse_unreadable, user_path

# ---- arrow -------------------------------------------------------------------------------------------------


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
        except Exception as error:  # arrow and its decoders raise many types
            raise UsageError(
                f"{self.location(index)}: the datasets library cannot read this ({one_line(error)}). "
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
        require_packages(str(path), "pyarrow")
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
        # A cache decorator on the method would keep every object alive, so each object has its own.
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
        require_packages(self.source, "datasets")
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
        fingerprint = "0" * 16  # avoids datasets' checksum over all bytes, as its cache is not used
        return DatasetRows(Dataset(content, fingerprint=fingerprint), self.source, self.folder)

    def _groups(self) -> Iterator[Any]:
        return map(self._metadata.row_group, range(self._metadata.num_row_groups))

    def _read_group(self, group: int) -> list[Row]:
        rows: list[Row] = self._read(
            lambda file: file.read_row_group(group).to_pylist(), f"row group {group + 1}"
        )
        return rows

    def _read(self, read: Callable[[Any], Any], noun: str) -> Any:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        try:
            with ParquetFile(self._path, metadata=self._metadata) as file:
                return read(file)
        except ArrowException as error:
            raise UsageError(
                f"{self.source}: {noun} is damaged ({one_line(error)}). Write the file again."
            ) from None


def is_saved_dataset(folder: Path) -> bool:
    """Return True for a folder written by `save_to_disk`."""
    return (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists()


def load_saved(folder: Path) -> Rows:
    """Load the dataset in this folder. If it has several splits, load the one named `train`.

    Raises `UsageError` if the folder cannot be loaded or has no such split.
    """
    require_packages(str(folder), "datasets")
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # json, arrow and the file system have no common error type
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


FORMS = (*READERS, ".parquet")

SPLITS = ("train", "training", "test", "validation", "valid", "val", "dev", "eval", "evaluation")
_SPLIT = re.compile(rf"(?:^|[-_. ])({'|'.join(sorted(SPLITS, key=len, reverse=True))})(?=[-_. ]|$)")


def read_rows(
    source: str | os.PathLike[str] | Sequence[Row],
    *,
    columns: Mapping[str, str] | None = None,
) -> Rows:
    """Return the rows of a file, a folder, a pattern, or a sequence of mappings. Raises `UsageError` if there
    are none.

    A pattern such as `data/*.jsonl` joins files. A folder has files of rows, a dataset of `save_to_disk`, or
    folders of classes. `columns` gives the column of a role if it has an unusual name: `{"text": "review"}`.
    """
    if isinstance(source, str | os.PathLike):
        source = user_path(source)
        rows = _rows_at(source)
    else:
        rows = _rows_in_memory(source)
    if columns is not None and not isinstance(columns, Mapping):
        raise UsageError(f'columns is {columns!r:.60}; it must be a mapping: columns={{"text": "review"}}.')
    if not len(rows):
        raise UsageError(f"{rows.source}: this dataset is empty. Training needs at least one sample.")
    rows.name_columns(columns or {})
    return rows


def _rows_in_memory(rows: object) -> Rows:
    # Attributes identify a dataset, so that `datasets` need not be imported.
    if hasattr(rows, "features") and hasattr(rows, "with_format"):
        return DatasetRows(rows, "the dataset")
    if isinstance(rows, Mapping):
        hint = f"[{next(iter(rows))!r}]" if rows else ""
        raise UsageError(
            f"A dataset must be a sequence of rows, not a mapping. Choose one of its splits: {hint}."
        )
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise UsageError(
            "A dataset must be a path, a list of mappings or a datasets.Dataset, not of type "
            f"{type(rows).__name__}."
        )
    return MemoryRows(cast("Sequence[Row]", rows))


def _rows_at(path: Path) -> Rows:
    with refuse_unreadable(path):
        if is_saved_dataset(path):
            return load_saved(path)
        if path.is_dir():
            return _folder(path)
        # The name of a file may itself contain characters of a pattern.
        if not path.exists() and glob.has_magic(str(path)):
            return _join(_matching_files(path), str(path))
        return _file(path)


def _file(path: Path) -> Rows:
    form = path.suffix.lower()
    if not path.exists():
        raise UsageError(f"{path}: there is no such file.{_similar_names(path)} Correct the path.")
    if form not in FORMS:
        raise UsageError(
            f"{path}: samples can be read from {', '.join(FORMS)}, by the end of the file's name. "
            "Rename the file, or write it in one of these forms."
        )
    if not path.is_file():
        raise UsageError(
            f"{path}: this is not a regular file, so samples cannot be read from it. Give a regular file."
        )
    return ParquetRows(path) if form == ".parquet" else READERS[form](path)


def _matching_files(pattern: Path) -> list[Path]:
    """Return the files that match a pattern, in the order of their names. Raises `UsageError` if there are
    none."""
    paths = sorted(Path(name) for name in glob.glob(str(pattern), recursive=True))
    files = [path for path in paths if path.is_file()]
    if files:
        return files
    if paths:
        raise UsageError(
            f"{pattern}: the pattern matches only folders, such as {paths[0]}. Add /*.jsonl to it."
        )
    raise UsageError(
        f"{pattern}: no file matches this pattern.{_similar_names(pattern)} Correct the pattern."
    )


def _folder(folder: Path) -> Rows:
    """Return the rows of a folder that has files of rows, or folders of classes. If it has folders of
    classes, only a file named `metadata` has rows.
    """
    # `__MACOSX` is an artefact of zip archives from macOS.
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith((".", "__MACOSX")))
    folders = [path for path in entries if path.is_dir()]
    files = [path for path in entries if path.suffix.lower() in FORMS and path.is_file()]
    files = [path for path in files if not path.name.startswith("_")]
    metadata = [path for path in files if path.stem.lower() == "metadata"]
    reader = _class_reader(folders)
    if metadata or (files and reader is None):
        _refuse_several_splits(files, folder)
        return _join(metadata or files, str(folder))
    if folders and {path.name.lower() for path in folders} <= set(SPLITS):
        raise UsageError(f"{folder}: this folder contains splits. Give one of them: {_first_paths(folders)}.")
    if reader is not None:
        return reader(folder)
    if _class_reader([folder]) is not None:
        raise UsageError(
            f"{folder}: samples without classes. Put each into a folder with the name of its class, or "
            "write a metadata.csv there, with the columns file_name and label."
        )
    among = f" Is it one of {_first_paths(folders)}?" if folders else ""
    raise UsageError(
        f"{folder}: this folder has no files of samples. Give a folder of {', '.join(FORMS)}, one written "
        f"by save_to_disk, or one with images in folders by class.{among}"
    )


def _class_reader(folders: Sequence[Path]) -> Callable[[Path], Rows] | None:
    """Return a feature's function that reads samples from folders named after their classes; None if the
    folders hold no samples."""
    return next((reader for find in hooks("class_reader") if (reader := find(folders))), None)


def _join(files: Sequence[Path], source: str) -> Rows:
    """Return the rows of one file, or of several files of one format. Raises `UsageError` for several
    formats.
    """
    forms = sorted({path.suffix.lower() for path in files})
    if len(forms) > 1:
        raise UsageError(
            f"{source}: files of several kinds ({', '.join(forms)}). Choose one kind with a pattern: "
            f"{files[0].parent / f'*{forms[0]}'}."
        )
    return _file(files[0]) if len(files) == 1 else JoinedRows([_file(path) for path in files], source)


def _refuse_several_splits(files: Sequence[Path], folder: Path) -> None:
    splits = {match[1]: path for path in files if (match := _SPLIT.search(path.stem.lower()))}
    if len(splits) > 1:
        first = next(iter(splits))
        raise UsageError(
            f"{folder}: its files belong to several splits ({', '.join(sorted(splits))}). Choose one with "
            f"a pattern: {folder / f'{first}*{splits[first].suffix}'}."
        )


def _first_paths(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths[:5])) + (", ..." if len(paths) > 5 else "")


def _similar_names(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    return did_you_mean(path.name, [other.name for other in path.parent.iterdir()])
