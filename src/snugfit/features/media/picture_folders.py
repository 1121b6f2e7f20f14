"""Datasets of pictures in folders named by their classes, as torchvision and `datasets` read them.

    pets/cat/1.png
    pets/cat/2.png
    pets/dog/1.jpg

Only the file names are read here, and stored as bytes in one array. Worker processes share it with their
parent. Classes are numbered in alphabetical order. `imagefolder` of `datasets` reads such folders too. But it
reads classes named `train` and `test` as splits, and reads every file again at each start.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from snugfit.data.rows import Row, Rows
from snugfit.errors import UsageError

PICTURES = (
    ".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm",
)  # fmt: skip


def contains_pictures(folders: Sequence[Path]) -> bool:
    """Return True if any of the folders contains a picture."""
    return any(_is_picture(entry.name) for folder in folders for entry in os.scandir(folder))


@final
class ClassFolders(Rows):
    """Dataset rows of pictures in folders named by class. Each has the picture's path as `image`, and the
    folder's name as `label`.
    """

    columns = ("image", "label")

    def __init__(self, folder: Path, folders: Sequence[Path]) -> None:
        import numpy as np

        self.source, self._folder = str(folder), folder
        self._classes = tuple(sorted(inner.name for inner in folders))
        self._other_files: list[str] = []
        names, owners = [], []
        for number, name in enumerate(self._classes):
            pictures = self._pictures(folder / name)
            names += [os.fsencode(picture) for picture in pictures]
            owners += [number] * len(pictures)
        self._names = np.array(names)  # file names as bytes, one for each picture
        self._owners = np.array(owners, dtype=np.int32)  # index of the class of each picture

    def _pictures(self, folder: Path) -> list[str]:
        """Return the sorted names of this folder's pictures."""
        # `scandir` has no fixed order, while samples must have the same order in every run.
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        entries = [entry for entry in entries if not entry.name.startswith(".")]
        if inner := next((entry for entry in entries if entry.is_dir()), None):
            raise UsageError(
                f"{inner.path}: images must be in folders named after their classes, "
                f"{self._folder}/CLASS/1.png, and not deeper. For another layout write a metadata.csv with "
                "the columns file_name and label."
            )
        self._other_files += [entry.path for entry in entries if not _is_picture(entry.name)]
        pictures = [entry.name for entry in entries if _is_picture(entry.name)]
        if not pictures:
            raise UsageError(
                f"{folder}: no image of this class ({', '.join(PICTURES)}). Add one, or remove the folder."
            )
        return pictures

    def __len__(self) -> int:
        return len(self._names)

    def _item(self, index: int) -> Row:
        return {"image": self.location(index), "label": self._classes[self._owners[index]]}

    def location(self, index: int) -> str:
        """Return the path of a row's picture, for error messages."""
        name = os.fsdecode(self._names[index])
        return os.path.join(self.source, self._classes[self._owners[index]], name)

    def class_names(self, column: str) -> tuple[str, ...]:
        """Return the class names of the column `label`, which are the folders' names."""
        return self._classes if column == "label" else ()

    def notes(self) -> Iterator[str]:
        """Yield a note with the number of files that are not pictures, and the name of the first."""
        if self._other_files:
            first = self._other_files[0]
            yield f"{len(self._other_files)} files are not images and are ignored, the first is {first}."


def _is_picture(name: str) -> bool:
    return not name.startswith(".") and name.lower().endswith(PICTURES)
