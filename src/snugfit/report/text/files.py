"""Writing of report files completely or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from snugfit.documents import write_whole
from snugfit.errors import UsageError
from snugfit.user_files import writable_folder


def write_atomically(path: Path, content: bytes) -> Path:
    """Write `content` to a file completely or not at all, create its folder if missing, and return the path.
    Raises `UsageError` if it cannot be written.
    """
    make_folder(path.parent)
    try:
        write_whole(path, content)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}). Name another file.") from None
    return path


def check_output(option: str, path: Path, endings: Sequence[str], rule: str) -> None:
    """Raise `UsageError`, before long work begins, for a file that cannot be written or has none of these
    endings.

    `rule` is the error's sentence that lists the allowed endings. The folder of the file is created later,
    with the file.
    """
    if path.suffix not in endings:
        raise UsageError(f"{option} {path}: {rule}.")
    writable_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Create a folder if it is missing. Raises `UsageError` if it cannot be created or written."""
    writable_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written ({error.strerror}). Name another folder.") from None
