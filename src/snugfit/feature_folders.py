"""The packages of all features, and the objects that their modules define.

A feature is a folder of `features/` that can be deleted, or a plugin: a package elsewhere with the same
modules. Packages that `techniques/feature.py` itself imports find a feature's fields of `Setup` (`fields.py`)
and model inputs (`inputs.py`) here.

A plugin is named on the command line (`--plugin`) or in the environment variable `PLUGINS`, which processes
inherit. It is an entry point of the group `snugfit.features`, or the path of a package's folder. Fields of
`Setup` are read once in a process. So plugins load before the first import of a module that uses features.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from snugfit.errors import SnugfitError, UsageError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable
    from types import ModuleType

T = TypeVar("T")

FOLDER = "snugfit.features"
"""The package whose folders are the features, and the group of entry points of plugins."""

PLUGINS = "SNUGFIT_PLUGINS"
"""Environment variable with the names and paths of plugins, separated by `os.pathsep`."""

INTERFACE = 1
"""Version of the interface between the core and plugins, which a plugin's `__init__.py` repeats."""


class FeatureError(SnugfitError):
    """Error for a feature that breaks a rule of the interface; the message is for the feature's author."""


@dataclass(frozen=True)
class Plugin:
    """A feature outside of `features/`."""

    name: str
    package: str
    """Import path of the plugin's package."""
    version: str
    """Version of the plugin, and a digest of its source."""


def use_plugins(words: Iterable[str]) -> None:
    """Load plugins by name or path in this process and those that it starts. Raises `UsageError` if the
    process has read the features already.
    """
    named = plugin_words()
    absolute = [os.path.abspath(word) if Path(word).is_dir() else word for word in words]
    if new := [word for word in dict.fromkeys(absolute) if word not in named]:
        if feature_packages.cache_info().currsize:
            raise UsageError(
                f"The plugin {new[0]} comes too late: this process uses features already. Set the variable "
                f"{PLUGINS} before snugfit is imported, or run python -m snugfit --plugin."
            )
        os.environ[PLUGINS] = os.pathsep.join([*named, *new])
    feature_packages()


@functools.cache
def plugins() -> tuple[Plugin, ...]:
    """Return the plugins that the environment variable `PLUGINS` names. Raises `UsageError` or
    `FeatureError`.
    """
    return tuple(map(_load, plugin_words()))


def plugin_words() -> list[str]:
    """Return the names and paths of plugins in the environment variable `PLUGINS`, each once."""
    return [*dict.fromkeys(word for word in os.environ.get(PLUGINS, "").split(os.pathsep) if word)]


def _load(word: str) -> Plugin:
    from importlib import metadata

    entries = [entry for entry in metadata.entry_points(group=FOLDER) if entry.name == word]
    if len(entries) > 1:
        packages = " and ".join(entry.dist.name for entry in entries if entry.dist)
        raise FeatureError(f"Two packages have a plugin {word!r}: {packages}. Uninstall one, or give a path.")
    folder = Path(os.path.expanduser(word)).resolve()
    if not entries and not (folder / "feature.py").is_file():
        known = ", ".join(sorted(entry.name for entry in metadata.entry_points(group=FOLDER))) or "none"
        raise UsageError(
            f"No plugin {word!r}: it is neither installed (installed: {known}) nor a folder with a file "
            "feature.py. Give a name or the path of such a folder."
        )
    name, package = (word, entries[0].value) if entries else (folder.name, folder.name)
    version = entries[0].dist.version if entries and entries[0].dist else ""
    try:
        module = importlib.import_module(package) if entries else _package_at(folder)
    except SnugfitError:
        raise
    except Exception as error:  # the plugin's own code
        raise _import_error(name, error) from error
    interface = getattr(module, "INTERFACE", 0)
    if interface != INTERFACE:
        older = interface < INTERFACE
        raise FeatureError(
            f"The plugin {name} has the interface {interface}, and this snugfit has {INTERFACE} "
            f"(INTERFACE in its __init__.py). Update {'the plugin' if older else 'snugfit'}."
        )
    version = version or str(getattr(module, "__version__", "0"))
    return Plugin(name, package, f"{version}+{_digest(Path(next(iter(module.__path__))))}")


def _package_at(folder: Path) -> ModuleType:
    """Import and return the package in this folder, whose parent is not on Python's path."""
    start = folder / "__init__.py"
    if not folder.name.isidentifier() or importlib.util.find_spec(folder.name) is not None:
        raise FeatureError(
            f"{folder}: the plugin's folder needs a name that no Python module has. Rename it."
        )
    spec = importlib.util.spec_from_file_location(
        folder.name, start, submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[folder.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _digest(folder: Path) -> str:
    """Return eight digits of a checksum of a package's source files."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".json"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]


def _import_error(name: str, error: Exception) -> FeatureError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return FeatureError(f"The plugin {name} cannot be imported: {reason}. Repair it, or leave it out.")


def import_feature(path: str) -> ModuleType:
    """Import a module of a feature. Raises `FeatureError` if the code of a plugin fails."""
    try:
        return importlib.import_module(path)
    except Exception as error:
        for plugin in plugins():
            if path.startswith(f"{plugin.package}."):
                raise _import_error(plugin.name, error) from error
        raise


def plugin_versions() -> dict[str, str]:
    """Return the version of each plugin."""
    return {f"plugin {plugin.name}": plugin.version for plugin in plugins()}


@functools.cache
def feature_packages() -> Mapping[str, str]:
    """Return the import paths of the packages of all features, by name, sorted. Raises `FeatureError`."""
    roots = importlib.import_module(FOLDER).__path__
    packages = {
        module.name: f"{FOLDER}.{module.name}" for module in pkgutil.iter_modules(roots) if module.ispkg
    }
    for plugin in plugins():
        if plugin.name in packages:
            raise FeatureError(f"Two features are called {plugin.name}. Rename the plugin, or leave it out.")
        packages[plugin.name] = plugin.package
    return dict(sorted(packages.items()))


def feature_files(folder: str) -> Iterator[Traversable]:
    """Yield the files in the subfolders of features that have this name."""
    for package in feature_packages().values():
        subfolder = resources.files(package) / folder
        yield from subfolder.iterdir() if subfolder.is_dir() else ()


def feature_objects(module: str, kind: type[T], *, feature_name: str = "") -> list[T]:
    """Return the objects of this class in the module of this name in each feature. `feature_name` limits the
    result to one feature.
    """
    modules = [
        f"{package}.{module}" for name, package in feature_packages().items() if feature_name in ("", name)
    ]
    return [
        value
        for path in modules
        if importlib.util.find_spec(path)
        for value in vars(import_feature(path)).values()
        if isinstance(value, kind)
    ]
