"""Sources of a model's config: presets, folders, the hub's local cache, the hub. See `model.py`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple

from snugfit.errors import ModelError, did_you_mean
from snugfit.job.config import parse_config, read_config
from snugfit.job.names import preset_of_same_size, presets_like, unquantized_name
from snugfit.job.repositories import refuse_other_library

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
LONGEST_NAME = 4096
ONE_MODEL = 0.9
"""Smallest similarity (1 for equal names) at which an error suggests a known model in place of an unknown
name.
"""
HUB_SECONDS = 4.0
"""Seconds that the Hugging Face hub may take to answer."""


class ModelFacts(NamedTuple):
    """A model's config values with the model's name, and the source of the values, such as a preset."""

    name: str
    """Full name of the model, with its owner."""
    origin: str
    """Source of the config: `preset`, `path` or `hub cache`. A config that was fetched from the hub is in
    that cache too.
    """
    facts: dict[str, Any]
    """Checked config as a dict of JSON values."""


def find_facts(name: str, *, online: bool, tell: Callable[[str], None]) -> ModelFacts:
    """Return the config of the model called `name`. `tell` is called with a sentence about each downloaded
    file.

    Raises `ModelError` with the names that are allowed.
    """
    if not name.strip() or "\0" in name or len(name) > LONGEST_NAME:
        raise ModelError(f"{name[:80]!r} is not the name of a model. {_ALLOWED}")
    if name.endswith(".py"):
        raise ModelError(f"{name} is a Python file, not a model. {_ALLOWED}")
    # Text in the form of a path is a path, even if no file is there. The error then names the path.
    if name.startswith((".", "/", "~")) or name.endswith(".json"):
        return _at_path(name)
    full_name = preset_named(name)
    if full_name:
        # A name that a preset and a folder share would be ambiguous.
        _refuse_two_meanings(name, full_name)
        return ModelFacts(full_name, "preset", read_preset(full_name))
    if os.path.lexists(name):
        return _at_path(name)
    return _from_hub(name, online=online, tell=tell)


def _at_path(name: str) -> ModelFacts:
    """Return the config of a local folder or file. Raises `ModelError`, also for another library's model."""
    path = os.path.expanduser(name)
    try:
        return ModelFacts(name, "path", read_config(_config_file(path)))
    except ModelError:
        if not _is_missing(path):
            refuse_other_library(name, [Path(path) if os.path.isdir(path) else Path(path).parent])
        raise


_ALLOWED = (
    "A model is the name of a preset, a folder with a config.json, the path of a config.json, or a "
    "name on the hub."
)


@cache
def preset_names() -> tuple[str, ...]:
    """Return the full names of the presets (configs bundled with snugfit), as the hub writes them."""
    owners = [owner for owner in _presets().iterdir() if owner.is_dir()]
    names = [
        f"{owner.name}/{file.name.removesuffix('.json')}"
        for owner in owners
        for file in owner.iterdir()
        if file.name.endswith(".json")
    ]
    return tuple(sorted(names, key=str.lower))


def read_preset(full_name: str) -> dict[str, Any]:
    """Return the config of a model that the package bundles, by its full name `owner/model`."""
    owner, bare = full_name.split("/")
    content = _presets().joinpath(owner, f"{bare}.json").read_bytes()
    return parse_config(content, location=f"preset {full_name}")


def _presets() -> Traversable:
    return resources.files("snugfit.job").joinpath("presets")


def preset_named(name: str) -> str | None:
    """Return the full name of the preset called `name`, which may omit the owner. Case is ignored. None
    without such a preset.
    """
    lowered = name.lower()
    for full_name in preset_names():
        if lowered in (full_name.lower(), full_name.lower().split("/")[1]):
            return full_name
    return None


def _refuse_two_meanings(name: str, full_name: str) -> None:
    if os.path.isfile(os.path.join(name, "config.json")):
        raise ModelError(
            f"{name!r} is a bundled preset and also a folder here. Write ./{name} for the folder, or run "
            f"in another directory for the preset {full_name}."
        )


def _config_file(path: str) -> Path:
    """Return the config.json at `path`: itself, or the one in the folder.

    Raises `ModelError` if there is neither.
    """
    if not os.path.isdir(path):
        if _is_missing(path):
            raise ModelError(f"{path}: no such file or folder. {_ALLOWED}")
        return Path(path)
    file = Path(path, "config.json")
    if _is_missing(file):
        inner = sorted(config.parent.name for config in Path(path).glob("*/config.json"))
        hint = f" There is one in {inner[-1]!r}: write {os.path.join(path, inner[-1])}." if inner else ""
        raise ModelError(f"{path}: this folder has no config.json.{hint or ' ' + _ALLOWED}")
    return file


def _is_missing(path: str | Path) -> bool:
    """Return True if the path does not exist. A path without permission counts as present: reading it will
    raise.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _from_hub(name: str, *, online: bool, tell: Callable[[str], None]) -> ModelFacts:
    """Return the config of a hub model: from the local cache, from a preset of the same sizes, or
    downloaded.
    """
    if not _HUB_ID.fullmatch(name):
        raise ModelError(f"No model {name!r}. {_ALLOWED}")
    if cached := _cached_config(name):
        try:
            return ModelFacts(name, "hub cache", read_config(cached))
        except ModelError:
            refuse_other_library(name, [cached.parent])
            raise
    # Tuned, mirrored and distilled models have a preset's sizes, so no download is needed.
    if base := preset_of_same_size(name, preset_names()):
        return ModelFacts(base, "preset", read_preset(base))
    # Names of quantized weights and of other libraries' models are refused before a download.
    plain_name = unquantized_name(name)
    unquantized = preset_of_same_size(plain_name, preset_names()) if plain_name else None
    refuse_other_library(name, _cached_folders(name), replacement=unquantized or "")
    _refuse_quantized(name, unquantized)
    fetched = read_config(_download_config(name, online=online))
    tell(f"config of {name} from the hub")
    return ModelFacts(name, "hub cache", fetched)


def _unknown_model(name: str, cause: str) -> ModelError:
    """Return the error for an unknown model: its `cause`, the most similar name, and presets of
    the same family."""
    bare = [full_name.split("/")[1] for full_name in preset_names()]
    # Names with other numbers are other models, and no typing mistakes.
    names = [preset for preset in (preset_names() if "/" in name else bare) if _sizes(preset) == _sizes(name)]
    # The same letters in another order are one mistyped name.
    swapped = [preset for preset in names if sorted(preset.lower()) == sorted(name.lower())]
    guess = did_you_mean(name, names, cutoff=ONE_MODEL) or did_you_mean(name, swapped)
    longer = [preset for preset in names if preset.lower().startswith(f"{name.lower()}-")]
    if not guess and longer:  # most people use the uncased ones of BERT's presets
        longer.sort(key=lambda preset: ("uncased" not in preset, len(preset)))
        guess = f" Did you mean {' or '.join(map(repr, longer[:3]))}?"
    return ModelError(
        f"No preset, folder or cached hub model {name!r}, and {cause}."
        f"{guess} {_ALLOWED}{presets_like(name, preset_names())}"
    )


def _refuse_quantized(name: str, unquantized: str | None) -> None:
    """Raise `ModelError` for a name of quantized weights, if the unquantized model is a preset."""
    if unquantized:
        raise ModelError(
            f"{name!r} names quantized weights, but snugfit predicts and trains unquantized ones. The same "
            f"model, unquantized: {unquantized}."
        )


def _sizes(name: str) -> list[str]:
    """Return the numbers in a model's name. Names with different numbers are different models, not typing
    mistakes.
    """
    return re.findall(r"\d+", name)


def _cached_config(name: str) -> Path | None:
    try:
        return cached_file(name, "config.json")
    except ValueError as error:
        raise ModelError(f"{name!r} is not a name on the hub: {_first_line(error)} {_ALLOWED}") from None


def cached_file(name: str, file: str) -> Path | None:
    """Return the path of a file of a hub model in the local cache, or None. It opens no socket.

    Raises `ValueError` for a name that is no hub id.
    """
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name, file)
    return Path(path) if isinstance(path, str) else None


def _cached_folders(name: str) -> list[Path]:
    """Return the folders of a hub model's revisions in the local cache."""
    from huggingface_hub import constants

    return [*Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}").glob("snapshots/*")]


def _download_config(name: str, *, online: bool) -> Path:
    """Download the config.json of a hub model and no other file.

    Raises `ModelError` when a download is not allowed, when the hub has no such file, or after `HUB_SECONDS`
    without an answer.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if not online or constants.HF_HUB_OFFLINE:
        cause = "HF_HUB_OFFLINE forbids" if online else "--offline forbids"
        raise _unknown_model(name, f"{cause} to ask the hub")
    try:
        executor = ThreadPoolExecutor(1)  # no library limits the time of a name server
        try:
            return Path(executor.submit(_fetch_config, name).result(HUB_SECONDS))
        finally:
            # A thread that waits for a name server must not hold up the answer.
            executor.shutdown(wait=False)
    except TimeoutError:
        raise _unknown_model(name, f"the hub did not answer within {HUB_SECONDS:.0f} s") from None
    except GatedRepoError:
        reason = "on the hub, its config is only for users who accepted its terms and are logged in"
        raise _unknown_model(name, f"{reason} (hf auth login)") from None
    except RepositoryNotFoundError:
        raise _unknown_model(
            name, "the hub does not have it, or it is private and you are not logged in"
        ) from None
    except Exception as error:
        # The library raises a subclass of it if the network is down.
        has_none = isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError)
        reason = "has no config.json for it" if has_none else f"cannot be reached ({_first_line(error)})"
        raise _unknown_model(name, f"the hub {reason}") from None


def _fetch_config(name: str) -> str:
    """Fetch a model's config from the hub; return its path in the local cache.

    The request for its size comes first. It fails at once without a network, where a download would try again
    for 20 s.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_SECONDS)
    return hf_hub_download(name, "config.json", etag_timeout=HUB_SECONDS)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
