"""The picture or sound in a dataset's row: a path, the bytes of a file, or decoded content.

| a row has                                | meaning                                             |
|------------------------------------------|-----------------------------------------------------|
| text                                     | a path; a relative one begins at the dataset's file |
| bytes                                    | the file itself                                     |
| {"bytes": ..., "path": ...}              | as `datasets` and its Parquet files keep media      |
| anything else                            | a decoded picture or sound                          |

No file is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snugfit.errors import UsageError


def path_in(value: Any, folder: Path) -> str | None:
    """Return the path of the media file that a row's value names; None if the value contains the file itself.
    A relative path begins in `folder`.
    """
    # If a mapping contains bytes, these are the file, and its path is only a name.
    if isinstance(value, Mapping) and value.get("bytes") is None:
        value = value.get("path")
    if not isinstance(value, str | os.PathLike):
        return None
    return os.path.join(folder, value) if folder.parts else os.fspath(value)


@dataclass(frozen=True, kw_only=True)
class MediaEntry:
    """A row's value in the column of pictures or sounds, and the location of the row."""

    value: Any
    """Picture or sound of a dataset's row: a path, bytes, a mapping of both, or decoded content."""

    rate: Any = None
    """Samples per second of a sound that is an array, from the row; None if unknown."""

    location: str
    """Position of the row in the dataset, for messages."""

    folder: Path
    """Folder that relative paths start from."""

    @property
    def path(self) -> str | None:
        """Path of the file in the value; None if the value contains the file itself."""
        return path_in(self.value, self.folder)

    @property
    def name(self) -> str:
        """The row and the file's path, as text for error messages."""
        path = self.path
        return self.location if path is None or path in self.location else f"{self.location}: {path}"

    def content(self) -> bytes | None:
        """Return the bytes of the media file; None if the value is decoded already. Raises `UsageError` for
        an unreadable file.
        """
        content = self.value.get("bytes") if isinstance(self.value, Mapping) else self.value
        if isinstance(content, bytes | bytearray | memoryview):
            return bytes(content)
        path = self.path
        if path is None:
            return None
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise UsageError(
                f"{self.name}: cannot be read ({error.strerror or error}).{self._hint()}"
            ) from None

    def missing_error(self) -> UsageError:
        """Return the error for a path at which there is no file."""
        return UsageError(f"{self.name}: no such file; correct the path.{self._hint()}")

    def _hint(self) -> str:
        path = str(self.value.get("path") if isinstance(self.value, Mapping) else self.value)
        if "://" in path:
            return " Nothing is downloaded. Give files on this machine."
        if Path(path).is_file():
            begins = f"a relative path starts at the folder of the dataset's file, {self.folder}"
            return f" The current directory has one, but {begins}."
        return ""


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as text for an error message, such as `3 x 224 x 224`."""
    return " x ".join(map(str, shape))
