"""The folders of all features, and the objects that their modules define.

A feature is a folder of `features/` that can be deleted. Rooms below the contract (`techniques/feature.py`)
find its fields of `Setup` (`fields.py`) and its inputs of models (`inputs.py`) here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from importlib import resources
from typing import TYPE_CHECKING, TypeVar

from snugfit.errors import SnugfitError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

T = TypeVar("T")

FOLDER = "snugfit.features"
"""The package whose folders are the features."""


class FeatureError(SnugfitError):
    """A feature breaks a rule of the contract; the message is for its author."""


@functools.cache
def feature_names() -> tuple[str, ...]:
    """Return the folders of all features, sorted."""
    roots = importlib.import_module(FOLDER).__path__
    return tuple(sorted(one.name for one in pkgutil.iter_modules(roots) if one.ispkg))


def feature_files(folder: str) -> Iterator[Traversable]:
    """Yield the files in the subfolders of features that have this name."""
    for name in feature_names():
        subfolder = resources.files(f"{FOLDER}.{name}") / folder
        yield from subfolder.iterdir() if subfolder.is_dir() else ()


def feature_objects(module: str, kind: type[T]) -> list[T]:
    """Return the objects of this kind in the module of this name of each feature that has one."""
    modules = [f"{FOLDER}.{name}.{module}" for name in feature_names()]
    return [
        value
        for path in modules
        if importlib.util.find_spec(path)
        for value in vars(importlib.import_module(path)).values()
        if isinstance(value, kind)
    ]
