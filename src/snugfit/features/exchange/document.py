"""A configuration file as data: its keys and values, its library, and its path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snugfit.errors import UsageError
from snugfit.features.exchange.command_line import read_shell
from snugfit.features.exchange.dialect import DIALECTS, dialect, recognise
from snugfit.features.exchange.python.read_script import code_of_notebook, read_script
from snugfit.user_files import load_json, load_yaml, read_text

FORMATS = {
    ".json": "json", ".yaml": "yaml", ".yml": "yaml", ".py": "python", ".sh": "shell", ".bash": "shell",
    ".sbatch": "shell", ".slurm": "shell", ".ipynb": "notebook",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Document:
    """A user's configuration file."""

    path: Path
    """Path of the file."""

    format: str
    """`json`, `yaml`, `python` (notebooks too) or `shell`."""

    dialect: str
    """The library whose keys these are."""

    values: dict[str, Any]
    """Keys and values of the file."""

    unread: tuple[tuple[int, str], ...] = ()
    """Line and text of statements of a script that may change the answer and were not read."""

    refused: tuple[tuple[int, str, str], ...] = ()
    """Line, text and reason of statements that are not predicted."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of a script's own options that were used."""


def open_document(path: Path, *, bfloat16: bool | None = None) -> Document:
    """Read the file at `path`.

    `bfloat16` is the named GPU's support for it, on which scripts depend; None if no GPU is named. Raises `UsageError` when it is not a file, or when no supported library reads such files.
    """
    if path.is_dir():
        names = sorted(file.name for file in path.iterdir() if file.suffix.lower() in FORMATS)
        shown = f"Name one of its files: {', '.join(names[:8])}" if names else "Name a file"
        raise UsageError(f"{path}: this is a folder, and one configuration file is read. {shown}.")
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path}: its name must end in {', '.join(FORMATS)}, which says what it is.")
    text, kind = read_text(path), FORMATS[path.suffix.lower()]
    if kind == "shell":
        caller, arguments = read_shell(text, str(path))
        return Document(path=path, format=kind, dialect=caller, values=arguments)
    if kind in ("python", "notebook"):
        code = code_of_notebook(text, str(path)) if kind == "notebook" else text
        script = read_script(code, str(path), bfloat16=bfloat16)
        return Document(
            path=path,
            format="python",
            dialect=script.dialect,
            values=script.arguments,
            unread=tuple(script.unread),
            refused=tuple(script.refused),
            defaults=script.defaults,
        )
    values = load_json(text, str(path)) if kind == "json" else load_yaml(text, str(path))
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UsageError(f"{path}: a configuration must be one mapping of names to values.")
    name = recognise(values)
    if name is None:
        known = "; ".join(f"{dialect(name).title}: {dialect(name).known_by[0]}" for name in DIALECTS)
        raise UsageError(f"{path}: none of its keys belongs to a known configuration ({known}, ...).")
    return Document(path=path, format=kind, dialect=name, values=values)
