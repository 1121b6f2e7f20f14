"""Writing a report's files so that each is either whole or not there."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from snugfit.documents import write_whole
from snugfit.errors import UsageError


def write_atomically(path: Path, content: bytes) -> Path:
    """Writes `content` as a document is written (`documents.py`), in a folder that is made where there is
    none yet; gives the path back. Raises `UsageError` when it cannot be written."""
    _make(path.parent)
    try:
        write_whole(path, content)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}).") from None
    return path


def write_new(files: Mapping[Path, str], *, force: bool) -> None:
    """Writes each file, or none; raises `UsageError` for one that exists already, without `force`."""
    existing = [str(path) for path in files if path.exists()]
    if existing and not force:
        raise UsageError(
            f"{', '.join(existing)}: already exists. Overwrite it with --force, or choose another name."
        )
    for folder in {path.parent for path in files}:
        _make(folder)
    for path, text in files.items():
        write_atomically(path, text.encode("utf-8"))


def check_output(option: str, path: Path | None, endings: Sequence[str], what: str) -> None:
    """Raises `UsageError`, before long work begins, where an option names a file with none of these endings
    (`what` says which it takes), or one that could not be written. Its folder is made when it is written."""
    if path is None:
        return
    if path.suffix not in endings:
        raise UsageError(f"{option} {path}: {what}.")
    writable_folder(path.parent)


def _make(folder: Path) -> None:
    writable_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written ({error.strerror}).") from None


def writable_folder(folder: Path) -> Path:
    """`folder`, when files could be written into it; nothing is left behind. Asked before long work begins.

    Tried rather than asked: a superuser may write everywhere, and /proc takes no file from anyone. Raises
    `UsageError` when it could not.
    """
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise UsageError(f"{folder}: {nearest} is a file. Name a folder.")
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise UsageError(
            f"{nearest}: nothing can be written into this folder ({error.strerror}). Name another."
        ) from None
    return folder
