"""Pictures in folders that are called as their classes, as torchvision and `datasets` read them:

    pets/cat/1.png
    pets/cat/2.png
    pets/dog/1.jpg

Only the names are read here, and kept as bytes in one array, which worker processes share with their parent.
Classes are numbered by the alphabet.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from snugfit.data.rows import Row, Table
from snugfit.errors import UsageError

PICTURES = (
    ".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm",
)  # fmt: skip


def holds_pictures(folders: Sequence[Path]) -> bool:
    """Whether there is a picture in any of them."""
    return any(_is_picture(entry.name) for folder in folders for entry in os.scandir(folder))


@final
class ClassFolders(Table):
    """A picture's path, as `image`, and the name of its folder, as `label`."""

    columns = ("image", "label")

    def __init__(self, folder: Path, folders: Sequence[Path]) -> None:
        import numpy as np

        self.source, self._folder = str(folder), folder
        self._classes = tuple(sorted(each.name for each in folders))
        self._others: list[str] = []
        names, owners = [], []
        for number, name in enumerate(self._classes):
            found = list(self._pictures(folder / name))
            names += [os.fsencode(each) for each in found]
            owners += [number] * len(found)
        self._names = np.array(names)
        self._owners = np.array(owners, dtype=np.int32)

    def _pictures(self, folder: Path) -> Iterator[str]:
        """The names of this folder's pictures, in order."""
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        seen = [entry for entry in entries if not entry.name.startswith(".")]
        if inner := next((entry for entry in seen if entry.is_dir()), None):
            raise UsageError(
                f"{inner.path}: pictures lie in folders of their classes, {self._folder}/CLASS/1.png, and not"
                " deeper. Write a metadata.csv for other orders, with the columns file_name and label."
            )
        self._others += [entry.path for entry in seen if not _is_picture(entry.name)]
        pictures = [entry.name for entry in seen if _is_picture(entry.name)]
        if not pictures:
            raise UsageError(f"{folder}: no picture of this class ({', '.join(PICTURES)}).")
        return iter(pictures)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Row:
        return {"image": self.where(index), "label": self._classes[self._owners[index]]}

    def where(self, index: int) -> str:
        """The picture itself."""
        name = os.fsdecode(self._names[index])
        return os.path.join(self.source, self._classes[self._owners[index]], name)

    def class_names(self, column: str) -> tuple[str, ...]:
        """The names of the folders."""
        return self._classes if column == "label" else ()

    def notes(self) -> Iterator[str]:
        """Files that are no pictures."""
        if self._others:
            yield f"{len(self._others)} files are no pictures and are left out, the first {self._others[0]}."


def _is_picture(name: str) -> bool:
    return not name.startswith(".") and name.lower().endswith(PICTURES)
