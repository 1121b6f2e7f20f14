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
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from snugfit.data.arrow_rows import DatasetRows, ParquetRows, is_saved_dataset, load_saved
from snugfit.data.rows import JoinedRows, MemoryRows, Row, Rows
from snugfit.data.text_rows import READERS
from snugfit.errors import UsageError, did_you_mean
from snugfit.techniques.registry import hooks
from snugfit.user_files import refuse_unreadable

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
        rows = _rows_at(Path(source).expanduser())
    else:
        rows = _rows_in_memory(source)
    if columns is not None and not isinstance(columns, Mapping):
        raise UsageError(f'columns is {columns!r:.60}; it must be a mapping: columns={{"text": "review"}}.')
    if not len(rows):
        raise UsageError(f"{rows.source}: this dataset is empty. Training needs at least one sample.")
    rows.name_columns(columns or {})
    return rows


def _rows_in_memory(rows: object) -> Rows:
    # Recognised by its attributes, so that `datasets` need not be imported.
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
