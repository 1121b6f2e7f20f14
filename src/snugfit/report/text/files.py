"""Writing of report files completely or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from snugfit.documents import write_whole
from snugfit.errors import UsageError
from snugfit.user_files import writable_folder


def write_atomically(path: Path, content: bytes) -> Path:
    """Write `content` to a file completely or not at all, create its folder if missing, and return the path.
    Raises `UsageError` if it cannot be written.
    """
    _make(path.parent)
    try:
        write_whole(path, content)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}). Name another file.") from None
    return path


def write_new(files: Mapping[Path, str], *, force: bool) -> None:
    """Write all files or none. Raises `UsageError` for a file that exists already, unless `force` is True."""
    existing = [str(path) for path in files if path.exists()]
    if existing and not force:
        raise UsageError(
            f"{', '.join(existing)}: already exists. Overwrite it with --force, or choose another name."
        )
    # All folders are created first, so that a failure leaves no file behind.
    for folder in {path.parent for path in files}:
        _make(folder)
    for path, text in files.items():
        write_atomically(path, text.encode("utf-8"))


def check_output(option: str, path: Path, endings: Sequence[str], rule: str) -> None:
    """Raise `UsageError`, before long work begins, for a file that cannot be written or has none of these
    endings.

    `rule` is the error's sentence that lists the allowed endings. The folder of the file is created later,
    with the file.
    """
    if path.suffix not in endings:
        raise UsageError(f"{option} {path}: {rule}.")
    writable_folder(path.parent)


def _make(folder: Path) -> None:
    writable_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written ({error.strerror}). Name another folder.") from None
