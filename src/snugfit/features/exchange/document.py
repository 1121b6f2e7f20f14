"""A training configuration file as data: its keys and values, its library, and its path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from snugfit.errors import UsageError
from snugfit.features.exchange.account import UnsupportedJobError
from snugfit.features.exchange.command_line import RUN_FILE, read_shell
from snugfit.features.exchange.dialect import DIALECTS, dialect, every_key, recognise, words_of
from snugfit.features.exchange.python.read_script import code_of_notebook, read_script
from snugfit.user_files import LARGEST_FILE, load_json, load_yaml, read_text

FORMATS: dict[str, str] = words_of("formats of files")


@dataclass(frozen=True, kw_only=True)
class Document:
    """The keys and values of a user's configuration file or script, with its library and path."""

    path: Path
    """Path of the user's file."""

    format: str
    """Format of the file: `json`, `yaml`, `python` (also notebooks) or `shell`."""

    dialect: str
    """Name of the dialect (library) that the file's keys belong to."""

    values: dict[str, Any]
    """Keys and values of the file."""

    unread: tuple[tuple[int, str], ...] = ()
    """Line and text of a script's statements that may affect the prediction and were not read."""

    refused: tuple[tuple[int, str, str], ...] = ()
    """Line, text and reason of script statements that snugfit cannot predict."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the script's own command-line options, if they were used."""


LARGEST_NOTEBOOK = 64 * LARGEST_FILE
"""Largest size in bytes of a notebook that is read. Notebooks contain pictures."""

LAUNCHERS = ("accelerate", "deepspeed")
"""Dialects of files that configure a launcher, and not a training run."""

NAMED_FILES = ("launcher.config_file", "launcher.deepspeed_config_file", "deepspeed", "fsdp_config")
"""Keys whose value may be the path of another configuration file."""


def open_documents(paths: Sequence[Path], *, bfloat16: bool | None = None) -> list[Document]:
    """Read the configuration files of one run, and the files that they name. The files of launchers (such as
    accelerate's) come first.

    Raises `UsageError` as `open_document` does, and for two files that both describe a run.
    """
    opened = [open_document(path, bfloat16=bfloat16) for path in paths]
    beside = [other for document in opened for other in _named_files(document)]
    documents = [*opened, *beside]
    # A script with an `Accelerator` has the dialect of a launcher, but describes a training run.
    runs = [one for one in documents if one.dialect not in LAUNCHERS or one.format == "python"]
    if len(runs) > 1:
        names = " and ".join(str(one.path) for one in runs[:2])
        raise UsageError(f"{names} both describe a run. Give one of them, with the files of its launcher.")
    last = runs[0] if runs else documents[-1] if documents else None
    return [*(one for one in documents if one is not last), *([last] if last else [])]


def _named_files(document: Document) -> Iterator[Document]:
    """Yield each configuration file for a launcher (such as accelerate) that a user's file names. Other named
    files become part of its values.
    """
    for key in NAMED_FILES:
        name = document.values.get(key)
        if not isinstance(name, str) or not name.endswith((".json", ".yaml", ".yml")):
            continue
        path = _beside(document, name)
        if path is None:
            continue
        if key == "launcher.config_file":
            del document.values[key]
            yield open_document(path)
            continue
        values = _mapping(path, read_text(path))
        del document.values[key]
        if key == "fsdp_config":
            document.values[key] = values
        else:
            yield Document(path=path, format=FORMATS[path.suffix], dialect="deepspeed", values=values)


def _mapping(path: Path, text: str) -> dict[str, Any]:
    """Return the content of a JSON or YAML file as a dict. Raises `UsageError` for content without keys."""
    load = load_json if path.suffix.lower() == ".json" else load_yaml
    values = load(text, str(path))
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        kind = "empty" if values is None else f"of the type {type(values).__name__}"
        raise UsageError(
            f"{path}: a configuration must be one mapping of names to values, and this one is {kind}. Write "
            "lines such as 'learning_rate: 2e-4'."
        )
    return values


def _beside(document: Document, name: str) -> Path | None:
    """Return the path of the file `name` in the folder of a user's configuration file, or in a parent folder.
    Return None if there is no such file.
    """
    folders = document.path.absolute().parents
    # A path of another machine is also searched by its file name.
    places = (*(folder / name for folder in folders), Path(name), folders[0] / Path(name).name)
    return next((one for one in places if one.is_file()), None)


def _with_run_file(command: Document) -> Document:
    """Return a training command's arguments together with the values of the configuration file that it names.
    The command's arguments override the file's.
    """
    name = command.values.get(RUN_FILE)
    path = _beside(command, name) if isinstance(name, str) else None
    if path is None:
        return command
    run = open_document(path)
    own = {key: value for key, value in command.values.items() if key not in (RUN_FILE, "config")}
    dialect_of_run = command.dialect if command.dialect == "sft" else run.dialect
    return replace(command, dialect=dialect_of_run, values={**run.values, **own})


def _other_tool(values: Mapping[str, Any]) -> str | None:
    """Return the name of the unsupported tool whose configuration this is; None for other configurations."""
    names = {key.rpartition(".")[2] for key, _ in every_key(values)}
    of_tools: dict[str, list[str]] = words_of("other tools")
    for tool, keys in of_tools.items():
        if set(keys) <= (names if keys == ["_component_"] else set(values)):
            return tool
    return None


def open_document(path: Path, *, bfloat16: bool | None = None) -> Document:
    """Read a user's configuration file, script or notebook at `path`.

    `bfloat16` is True if the named GPU supports bfloat16, on which scripts depend; None if no GPU is named.
    Raises `UsageError` when it is not a file, or when no supported library reads such files.
    """
    if path.is_dir():
        names = sorted(file.name for file in path.iterdir() if file.suffix.lower() in FORMATS)
        shown = f"Name one of its files: {', '.join(names[:8])}" if names else "Name a file"
        raise UsageError(f"{path}: this is a folder, and one configuration file is read. {shown}.")
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path}: its name must end in one of {', '.join(FORMATS)}. Rename the file.")
    kind = FORMATS[path.suffix.lower()]
    text = read_text(path, largest=LARGEST_NOTEBOOK if kind == "notebook" else LARGEST_FILE)
    if kind == "shell":
        caller, arguments = read_shell(text, str(path))
        return _with_run_file(Document(path=path, format=kind, dialect=caller, values=arguments))
    if kind in ("python", "notebook"):
        code, broken = code_of_notebook(text, str(path)) if kind == "notebook" else (text, [])
        script = read_script(code, str(path), bfloat16=bfloat16)
        return Document(
            path=path,
            format="python",
            dialect=script.dialect,
            values=script.arguments,
            unread=(*broken, *script.unread),
            refused=tuple(script.refused),
            defaults=script.defaults,
        )
    values = _mapping(path, text)
    if tool := _other_tool(values):
        raise UnsupportedJobError(
            f"{path}: this is a configuration of {tool}, which is not read. Give the model itself: snugfit "
            "predict MODEL --task TASK --batch-size N --recipe ..."
        )
    name = recognise(values)
    if name is None:
        known = "; ".join(
            f"{dialect(name).title}: {dialect(name).known_by[0]}"
            for name in DIALECTS
            if dialect(name).known_by
        )
        raise UsageError(
            f"{path}: none of its keys belongs to a known configuration ({known}, ...). Give a file of "
            "TrainingArguments, accelerate, DeepSpeed or another known tool."
        )
    return Document(path=path, format=kind, dialect=name, values=values)
