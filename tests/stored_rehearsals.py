"""Store rehearsals on disk for tests of plans, reports and commands.

A test with the marker `stored_rehearsals` reads a rehearsal from the folder `.rehearsals` of the checkout. It
stores each one that is missing there. Workers share the folder, and so do later sessions. The key of a
rehearsal is its function, its arguments, the installed versions and a hash of the simulation's source.

Tests of the simulation itself never have the marker. Some rehearsals are never stored: those of a module, of
compiled layers, and those under a policy of the CPU. The same holds if the test patches the simulation, torch
or transformers with `monkeypatch`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import inspect
import os
import pickle
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import snugfit
from snugfit.prediction.profile import installed_versions

MARKER = "stored_rehearsals"
ROOMS = (
    "documents", "errors", "feature_folders", "features", "hub_kernels", "job", "rehearsal",
    "results", "step", "techniques", "units", "versions",
)  # fmt: skip
"""Files and folders of the package on which a rehearsal depends: all imports of `rehearsal`. From features,
only those that add fields of `Setup`, without their modules for searches, prices and training runs, and the
files `inputs.py`."""

ABOVE = re.compile(
    r"^ *from snugfit\.(cli|frontends|measurement|planning|prediction|report|training)\b", re.MULTILINE
)
"""An import of a room above `rehearsal`, by which a feature's module is no part of a rehearsal."""

SIZES = "planning/cost/batch_sizes.py"
"""The only other file that rehearses. It imports from `ROOMS` alone."""

STORED = {
    "snugfit.rehearsal.rehearse": "rehearse",
    "snugfit.rehearsal.splice": "record_passes rehearse_update",
    "snugfit.features.engine.parts": "rehearse_captured_update",
    "snugfit.planning.cost.batch_sizes": "rehearse_sizes",
}
"""Functions whose results are stored, by module, if its feature is there."""

PACKAGE = Path(snugfit.__file__).parent
FOLDER = Path(__file__).parents[1] / ".rehearsals"
KEPT_SOURCES = 3
"""Number of versions of the source whose rehearsals stay on disk."""


class NotStorable(Exception):
    """Raised for an argument without a description that is the same in every process."""


def sources(package: Path = PACKAGE) -> Iterator[Path]:
    """Return the files of the simulation, sorted."""
    for name in ROOMS:
        file = package / f"{name}.py"
        with_fields = [path.parent for path in package.glob(f"{name}/*/fields.py")]
        folders = with_fields or [package / name]
        files = {path for folder in folders for path in folder.rglob("*.py") if path.parent.name != "tests"}
        files -= {path for path in files if with_fields and ABOVE.search(path.read_text(encoding="utf-8"))}
        yield from [file] if file.exists() else sorted(files.union(package.glob(f"{name}/*/inputs.py")))
    yield package / SIZES


def source_hash(package: Path = PACKAGE, versions: Mapping[str, str] | None = None) -> str:
    """Return a hash of the simulation's source, of Python's version and of those of the packages."""
    found = hashlib.sha256(repr((sys.version_info, versions or installed_versions())).encode())
    for file in sources(package):
        content = file.read_bytes()
        found.update(f"{file.relative_to(package)} {len(content)} ".encode() + content)
    return found.hexdigest()[:20]


def describe(value: Any) -> str:
    """Return text that is equal for equal values alone. Raises `NotStorable`."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return repr(value)
    kind = type(value).__qualname__
    if isinstance(value, Enum):
        return f"{kind}.{value.name}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return f"{kind}({', '.join(f'{name}={describe(one)}' for name, one in named.items())})"
    if isinstance(value, Mapping):
        return f"{kind}{{{', '.join(f'{describe(key)}: {describe(one)}' for key, one in value.items())}}}"
    if isinstance(value, set | frozenset):
        return f"{kind}{{{', '.join(sorted(map(describe, value)))}}}"
    if isinstance(value, tuple | list):
        return f"{kind}[{', '.join(map(describe, value))}]"
    raise NotStorable(kind)


class RehearsalStore:
    """The folder of stored rehearsals, and the running test."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        self.item: pytest.Item | None = None

    @functools.cached_property
    def source(self) -> Path:
        """Return the folder of the current source. Remove the oldest folders of other sources."""
        folder = self.folder / source_hash()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.utime(folder)
        except OSError:  # a read-only checkout
            return folder
        others = sorted(self.folder.iterdir(), key=lambda one: one.stat().st_mtime, reverse=True)
        for old in others[KEPT_SOURCES:]:
            shutil.rmtree(old, ignore_errors=True)
        return folder

    def begin(self, item: pytest.Item) -> None:
        """Store the running test if it has the marker."""
        self.item = item if item.get_closest_marker(MARKER) else None

    def file_of(self, name: str, arguments: Mapping[str, Any]) -> Path | None:
        """Return the file of a rehearsal, or None if it must not be stored."""
        compiled = getattr(arguments["setup"], "compile", None) is not None
        if self.item is None or compiled or type(arguments["policy"]).__name__ == "CpuPolicy":
            return None
        if patches_simulation(self.item):
            return None
        try:
            asked = describe([name, *arguments.values()])
        except NotStorable:
            return None
        return self.source / hashlib.sha256(asked.encode()).hexdigest()[:32]

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its results stored. The result includes the sizes that a `ComparedPolicy`
        collects."""
        signature = inspect.signature(function)

        @functools.wraps(function)
        def stored(*arguments: Any, **keywords: Any) -> Any:
            bound = signature.bind(*arguments, **keywords)
            bound.apply_defaults()
            file = self.file_of(function.__name__, bound.arguments)
            if file is None:
                return function(*arguments, **keywords)
            sizes = getattr(bound.arguments["policy"], "sizes", {})
            known = read(file)
            if known is not None:
                sizes.update(known[1])
                return known[0]
            result = function(*arguments, **keywords)
            write(file, (result, dict(sizes)))
            return result

        return stored

    def install(self) -> None:
        """Wrap the functions in `STORED`, also in modules that have imported them already."""
        for name, functions in STORED.items():
            if not PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py").exists():
                continue
            module = importlib.import_module(name)
            for function in functions.split():
                real = getattr(module, function)
                stored = self.wrap(real)
                for other in [one for name, one in sys.modules.items() if name.startswith("snugfit.")]:
                    if vars(other).get(function) is real:
                        setattr(other, function, stored)


def patches_simulation(item: pytest.Item) -> bool:
    """Return true if the test has patched a module that a rehearsal runs."""
    patch = getattr(item, "funcargs", {}).get("monkeypatch")
    owners = [owner for owner, _, _ in getattr(patch, "_setattr", ())]
    modules = [getattr(owner, "__module__", None) or getattr(owner, "__name__", "") for owner in owners]
    simulation = tuple(f"snugfit.{room}" for room in ROOMS)
    return any(module.startswith((*simulation, "torch.", "transformers.")) for module in modules)


def read(file: Path) -> tuple[Any, dict[Any, Any]] | None:
    """Return the stored rehearsal, or None if it is missing or damaged."""
    try:
        found = pickle.loads(file.read_bytes())
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError):
        return None
    return found if type(found) is tuple and len(found) == 2 else None


def write(file: Path, content: object) -> None:
    """Store a rehearsal atomically, so that other processes read whole files. Ignore file system errors."""
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as part:
        part.write(pickle.dumps(content, pickle.HIGHEST_PROTOCOL))
        part.flush()
        os.replace(part.name, file)


STORE = RehearsalStore()
