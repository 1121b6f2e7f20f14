"""Repositories of other libraries' models, such as diffusers, which are no models of transformers.

A feature's module `repositories.py` has an `OtherRepository` for each library that it supports in another way
than by a model's name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from snugfit.errors import ModelError
from snugfit.feature_folders import feature_objects

LARGEST_CONFIG = 1 << 20
"""Largest size in bytes of a config.json in which a library's key is searched."""


@dataclass(frozen=True, kw_only=True)
class OtherRepository:
    """The marks of a library's repositories, and advice for the user who gives one as a model."""

    contents: str
    """Noun for the contents of such a repository, such as `a pipeline of diffusers`."""
    id_pattern: str
    """Regular expression of such repositories' ids on the Hugging Face hub. Case is ignored."""
    advice: str
    """Sentence with the command that predicts such a model."""
    files: str = ""
    """Pattern of a file that only such repositories have; empty for none."""
    config_key: str = ""
    """Key of config.json that only such repositories have; empty for none."""

    def matches(self, name: str, folders: Iterable[Path]) -> bool:
        """Return True if the id or a folder of this name belongs to the library."""
        return bool(re.fullmatch(self.id_pattern, name, re.IGNORECASE)) or any(map(self._is_in, folders))

    def _is_in(self, folder: Path) -> bool:
        if self.files and next(folder.glob(self.files), None):
            return True
        config = folder / "config.json"
        if not self.config_key or not config.is_file() or config.stat().st_size > LARGEST_CONFIG:
            return False
        return f'"{self.config_key}"' in config.read_text(errors="replace")


def refuse_other_library(name: str, folders: Iterable[Path] = (), *, replacement: str = "") -> None:
    """Raise `ModelError` with advice if the model belongs to another library than transformers.

    `folders` are the local folders of the model. `replacement` names the same model in transformers.
    """
    known = [*folders]
    for other in _repositories():
        if other.matches(name, known):
            same = f" The same model in transformers: {replacement}." if replacement else ""
            raise ModelError(f"{name} is {other.contents}, not a model of transformers. {other.advice}{same}")


@functools.cache
def _repositories() -> tuple[OtherRepository, ...]:
    return tuple(feature_objects("repositories", OtherRepository))
