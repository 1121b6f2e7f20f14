"""Default values of options, from `config.yaml` in the user's configuration folder or from the environment.

    gpu: rtx 4090
    headroom: 1GiB

`SNUGFIT_GPU` and `SNUGFIT_HEADROOM` override the file. Flags, `--set` and job files override both. Only
options about the user's machine have such defaults, so that the same job has the same answer everywhere. A
default that is used is printed on stderr.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from snugfit.errors import UsageError, did_you_mean
from snugfit.user_files import load_yaml, read_text

KEYS = ("gpu", "headroom")
"""Options that may have a default of the user."""


def config_file() -> Path:
    """Return the path of the user's defaults, `snugfit/config.yaml` in `$XDG_CONFIG_HOME` or `~/.config`."""
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(os.path.expanduser(folder)) / "snugfit" / "config.yaml"


def user_defaults() -> dict[str, tuple[str, str]]:
    """Return each default with its source, by option. Raises `UsageError` for a wrong file."""
    file = config_file()
    in_file = {key: (value, str(file)) for key, value in _read(file).items()} if file.exists() else {}
    names = {key: f"SNUGFIT_{key.upper()}" for key in KEYS}
    return in_file | {key: (os.environ[name], name) for key, name in names.items() if os.environ.get(name)}


def _read(file: Path) -> dict[str, str]:
    document = load_yaml(read_text(file, noun="file of defaults"), str(file))
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UsageError(
            f"{file}: it is not a table. Write lines such as `gpu: rtx 4090`, or remove the file."
        )
    for key, value in document.items():
        if key not in KEYS:
            near = did_you_mean(str(key), KEYS)
            raise UsageError(
                f"{file}: {key!r} has no default of your own.{near} Allowed: {', '.join(KEYS)}. Settings of "
                "a job belong into a job file."
            )
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise UsageError(f"{file}: {key} is {value!r}; it must be a text, such as `{key}: ...`.")
    return {key: str(value) for key, value in document.items()}


def add_defaults(flags: Mapping[str, Any], settings: dict[str, Any]) -> None:
    """Add the user's defaults to `settings` of a command with the options `flags`, and print them on stderr.

    A command that predicts for a GPU has the option `memory`. Others run on the GPU that is there, and a
    given memory describes a GPU of its own. Neither has a default GPU.
    """
    if "memory" not in flags or "memory" in settings:
        return
    for key, (value, source) in user_defaults().items():
        if key in flags and key not in settings:
            settings[key] = value
            typer.echo(f"{key}: {value}, from {source}", err=True)
