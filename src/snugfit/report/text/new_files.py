"""Writing files that a user keeps: never over another one without being told to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from snugfit.errors import UsageError
from snugfit.report.text.files import write_atomically


def write_new(files: Mapping[Path, str], *, force: bool) -> None:
    """Writes each file, or none: one that is there already is refused before anything is written.

    Raises `UsageError`.
    """
    there = [str(path) for path in files if path.exists()]
    if there and not force:
        raise UsageError(f"{', '.join(there)}: there already. Write over it with --force, or name another.")
    for folder in {path.parent for path in files}:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{folder}: cannot be made ({error.strerror}).") from None
    for path, text in files.items():
        write_atomically(path, text.encode("utf-8"))
