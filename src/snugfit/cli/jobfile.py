"""Job files: the command line's arguments, written down in YAML.

    model: bert-large-uncased
    task: sequence-classification
    batch_size: 32
    recipe: bf16 + micro_batches(8)
    gpu: rtx 4090

A job file is flat and has words and numbers only, so most of YAML is refused rather than parsed
(`user_files.py`). Numbers follow YAML 1.2, as people write them today. `1e-5` is a number (YAML 1.1 reads a
word), and `010` is refused (YAML 1.1 reads eight).

Keys of other trainers are distinguished from typing mistakes: `techniques/roster.py` gives the replacement.
"""

from __future__ import annotations

import math
import re
import types
import typing
from functools import cache
from pathlib import Path
from typing import Any

from snugfit.errors import SnugfitError, UsageError, nearest
from snugfit.job.inputs import setting_keys
from snugfit.job.job import Job
from snugfit.techniques.registry import hooks
from snugfit.techniques.roster import foreign_names
from snugfit.training.options import TrainOptions
from snugfit.user_files import LimitedLoader, load_yaml, read_text

DEEPEST = 3
_COMMAND_KEYS: dict[str, type] = {
    **dict.fromkeys(
        (
            "recipe",
            "gpu",
            "mesh",
            "memory",
            "headroom",
            "keep",
            "free",
            "loop",
            "software",
            "plugin",
            "vocab_size",
        ),
        str,
    ),
    "gpus": int,
}  # fmt: skip
_DATA = {
    "dataset": str, "eval_dataset": str, "tokenizer": str, "processor": str, "columns": str, "pack": bool,
    "weights": str, "from_scratch": bool, "output_dir": str, "device": str,
}  # fmt: skip
KEYS = (
    "Keys are options with underscores, as batch_size, sequence_length, recipe, gpu, output_dir. For all: "
    "snugfit train --help"
)
_OCTAL = re.compile(r"[-+]?0[0-9_]+")


def read_job_file(path: Path) -> dict[str, Any]:
    """Return the settings in a job file, each of its key's type. Raises `UsageError` that names file and
    line.
    """
    document = load_yaml(read_text(path, noun="job file"), str(path), _Loader)
    if document is None:
        raise UsageError(f"{path}: the file is empty. Write lines such as `model: bert-large-uncased`.")
    if not isinstance(document, dict):
        raise UsageError(f"{path}: a job file has lines of `key: value`, but this is {_kind_of(document)}.")
    return settings_from(document, str(path))


def read_setting(text: str) -> tuple[str, Any]:
    """Return the key and the value of `--set key=value`."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UsageError(f"--set {text!r}: write key=value, for example --set batch_size=8.")
    head = key.split(".")[0]
    if "." in key and head in kinds():
        raise UsageError(f"--set {text!r}: {head} has a single value and no parts. Write --set {head}=...")
    return next(iter(settings_from({key: load_yaml(value, "--set", _Loader)}, "--set").items()))


@cache
def kinds() -> dict[str, type]:
    """Return every key that a job file may have, with the type of its value. The keys are the job's fields,
    further options of a command, and those of training alone. One file serves predict, plan and train.
    """
    of_job = _kinds_of(Job)
    # Each setting of a job's phases and tasks has a key of its own in the file.
    del of_job["phase_settings"]
    return of_job | setting_keys() | _COMMAND_KEYS | training_keys()


@cache
def training_keys() -> dict[str, type]:
    """Return the keys that only `snugfit train` reads, with their types. Arguments of a learning-rate
    schedule are not included, because they are given from Python.
    """
    key_types = _kinds_of(TrainOptions)
    del key_types["lr_scheduler_kwargs"]
    return key_types | _DATA


def _kinds_of(owner: type) -> dict[str, type]:
    key_types: dict[str, type] = {}
    for name, hint in typing.get_type_hints(owner).items():
        # An optional field has the form `kind | None`.
        plain = typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint
        key_types[name] = plain if plain in (int, float, bool) else str
    return key_types


def settings_from(document: dict[Any, Any], location: str) -> dict[str, Any]:
    """Return the settings of a job file with checked keys and values. Raises `UsageError` that lists all
    unknown keys.
    """
    names = foreign_names()
    document = {names.same.get(key, key): value for key, value in document.items()}
    wrong = [_unknown(key, value, names.keys) for key, value in document.items() if key not in kinds()]
    if wrong:
        lines = [*wrong, KEYS, *_whose(document)]
        raise UsageError(f"{location}: " + "\n".join(lines))
    return {key: _of_kind(kinds()[key], key, value, location) for key, value in document.items()}


def _of_kind(kind: type, key: str, value: Any, location: str) -> Any:
    if value is None and _may_be_none(key):
        return None
    if isinstance(value, str) and kind is not str and _OCTAL.fullmatch(value):
        raise UsageError(
            f"{location}: {key} is {value}, which YAML reads as octal. Write {int(value.replace('_', ''))}."
        )
    # Values such as `vocab_size: 32064` are numbers in YAML.
    if kind is str and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if math.isfinite(value):
            return float(value)
    elif kind in (int, bool) and type(value) is kind:
        return value
    takes = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}[kind]
    shown = f"{value!r}" if isinstance(value, str | int | float) else _kind_of(value)
    raise UsageError(f"{location}: {key} is {shown[:80]}; it must be {takes}.")


def _may_be_none(key: str) -> bool:
    hints = {**typing.get_type_hints(TrainOptions), **typing.get_type_hints(Job)}
    return type(None) in typing.get_args(hints.get(key))


def _unknown(key: Any, value: Any, advice: dict[str, str]) -> str:
    """Return an error line about an unknown key of a job file: another trainer's key, a typing mistake, or
    neither.
    """
    if not isinstance(key, str):
        return f"the key {key!r} is not text. Put it in quotes."
    if key in advice:
        return f"{key} is a name from another trainer: {advice[key]}.{_about_value(key, value)}"
    near = nearest(key, [*kinds(), *advice], count=1)
    if near and near[0] in advice:
        return f"unknown key {key!r}. Did you mean {near[0]!r}? Here: {advice[near[0]]}."
    # The first word of a key is not similar enough to it: `batch` for `batch_size`.
    similar = nearest(key, kinds()) or [one for one in kinds() if one.startswith(f"{key}_")]
    return f"unknown key {key!r}." + (f" Did you mean {' or '.join(map(repr, similar))}?" if similar else "")


def _whose(document: dict[Any, Any]) -> list[str]:
    """Return a sentence, in a list, that names the library to which the config file belongs; empty for an
    unknown library.
    """
    strange = {key: value for key, value in document.items() if key not in kinds()}
    return [advice for of in hooks("advice_on_file") if (advice := of(strange))]


def _about_value(key: str, value: Any) -> str:
    """Return a sentence with snugfit's recipe for another trainer's optimizer name; empty for other keys."""
    if key not in ("optim", "optimizer") or not isinstance(value, str):
        return ""
    from snugfit.techniques.roster import find

    try:
        return f" Here: recipe: {find(value).name}."
    except SnugfitError as error:
        return f" {error}"


def _kind_of(value: Any) -> str:
    return {dict: "a mapping", list: "a list", type(None): "nothing"}.get(type(value), f"{value!r}"[:80])


class _Loader(LimitedLoader):
    """YAML loader for job files: it accepts only flat mappings, and resolves scalars as YAML 1.2 does."""

    deepest = DEEPEST
    # PyYAML's resolvers follow YAML 1.1, in which `no` is False and `1:30` a number.
    yaml_implicit_resolvers: typing.ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}  # type: ignore[misc]


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]{0,18})", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)
