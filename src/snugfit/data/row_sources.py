"""Where a path leads: to one file of rows, to several as one dataset, or to a folder of another kind.

    reviews.jsonl       its rows; the end of the name says how they are written
    data/*.jsonl        those of every file that the pattern fits
    data                a folder: what `save_to_disk` wrote; else every file of rows in it; else pictures in
                        folders that are called as their classes

Several files are one dataset in the order of their names, so that sample 70,000 is the same one at every
start. Files of several kinds are not mixed, and a folder that holds `train-...` beside `test-...` is asked
about: what is kept for testing must not be trained on by a slip.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from snugfit.data import row_arrow, row_files
from snugfit.data.row_folders import ClassFolders, holds_pictures
from snugfit.data.row_shards import Shards
from snugfit.data.rows import Table
from snugfit.errors import UsageError, did_you_mean

FORMS = (*row_files.READERS, ".parquet")

SPLITS = ("train", "training", "test", "validation", "valid", "val", "dev", "eval", "evaluation")
_SPLIT = re.compile(rf"(?:^|[-_. ])({'|'.join(sorted(SPLITS, key=len, reverse=True))})(?=[-_. ]|$)")


def table_at(path: Path, split: str | None) -> Table:
    """The rows there. Raises `UsageError`."""
    try:
        if row_arrow.is_saved(path):
            return row_arrow.saved(path, split)
        if split is not None:
            raise UsageError(
                f"{path}: a file has no splits. Leave split={split!r} out, or give the split's file."
            )
        if path.is_dir():
            return _folder(path)
        if not path.exists() and glob.has_magic(str(path)):
            return _joined(_fitting(path), str(path))
        return _file(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}).") from None


def _file(path: Path) -> Table:
    form = path.suffix.lower()
    if not path.exists():
        raise UsageError(f"{path}: no such file of samples.{_beside(path)}")
    if form not in FORMS:
        raise UsageError(f"{path}: samples are read from {', '.join(FORMS)}; the name says which.")
    if not path.is_file():
        raise UsageError(f"{path}: a file of samples is a regular file, and this is not one.")
    return row_arrow.Parquet(path) if form == ".parquet" else row_files.READERS[form](path)


def _fitting(pattern: Path) -> list[Path]:
    """The files that a pattern fits."""
    found = sorted(Path(name) for name in glob.glob(str(pattern), recursive=True))
    files = [path for path in found if path.is_file()]
    if files:
        return files
    if found:
        raise UsageError(f"{pattern}: the pattern fits folders only, such as {found[0]}. Add /*.jsonl to it.")
    raise UsageError(f"{pattern}: no file fits this pattern.{_beside(pattern)}")


def _folder(folder: Path) -> Table:
    """A folder of files of rows, or of pictures. Beside pictures, only a `metadata` file is one of rows."""
    within = sorted(each for each in folder.iterdir() if not each.name.startswith((".", "__MACOSX")))
    folders = [each for each in within if each.is_dir()]
    files = [each for each in within if each.suffix.lower() in FORMS and each.is_file()]
    files = [each for each in files if not each.name.startswith("_")]
    about = [each for each in files if each.stem.lower() == "metadata"]
    if about or (files and not holds_pictures(folders)):
        _refuse_several_splits(files, folder)
        return _joined(about or files, str(folder))
    if folders and {each.name.lower() for each in folders} <= set(SPLITS):
        raise UsageError(f"{folder}: it holds splits. Give one of them: {_listed(folders)}.")
    if holds_pictures(folders):
        return ClassFolders(folder, folders)
    if holds_pictures([folder]):
        raise UsageError(
            f"{folder}: pictures without classes. Put each into a folder that is called as its class, or"
            " write a metadata.csv there, with the columns file_name and label."
        )
    among = f" Is it one of {_listed(folders)}?" if folders else ""
    raise UsageError(
        f"{folder}: this folder holds no files of samples ({', '.join(FORMS)}), no dataset that save_to_disk"
        f" wrote, and no pictures in folders of their classes.{among}"
    )


def _joined(files: Sequence[Path], source: str) -> Table:
    """One file's rows, or those of several of one kind."""
    forms = sorted({path.suffix.lower() for path in files})
    if len(forms) > 1:
        raise UsageError(
            f"{source}: files of several kinds ({', '.join(forms)}). Name one kind by a pattern:"
            f" {files[0].parent / f'*{forms[0]}'}."
        )
    return _file(files[0]) if len(files) == 1 else Shards([_file(path) for path in files], source)


def _refuse_several_splits(files: Sequence[Path], folder: Path) -> None:
    named = {found[1]: path for path in files if (found := _SPLIT.search(path.stem.lower()))}
    if len(named) > 1:
        first = next(iter(named))
        raise UsageError(
            f"{folder}: its files are of several splits ({', '.join(sorted(named))}). Name one by a pattern:"
            f" {folder / f'{first}*{named[first].suffix}'}."
        )


def _listed(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths[:5])) + (", ..." if len(paths) > 5 else "")


def _beside(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    return did_you_mean(path.name, [each.name for each in path.parent.iterdir()])
