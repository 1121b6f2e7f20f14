"""The roster: the list of all techniques. Each folder is a slot (a choice of a recipe), each file one
technique.

A folder is a slot, a file in it is a technique, and the file's name is the word in a recipe. So a new
technique is one new file, and no list grows with it. Features add techniques of their own (`feature.py`). The
roster checks each file against the few rules on which the rest of the code relies. If a file breaks one, it
raises `RosterError` for the file's author. Listing names imports no torch: a technique file imports it, if at
all, inside functions.

The roster also has the words of other libraries, each with its replacement here. A word for a technique that
snugfit has is in that technique's `elsewhere`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import pkgutil
import re
import textwrap
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from snugfit.errors import RecipeError, SnugfitError, did_you_mean
from snugfit.feature_folders import import_feature
from snugfit.job.job import Job
from snugfit.techniques.registry import technique_modules
from snugfit.techniques.setting import describe, setting_types, show_setting
from snugfit.techniques.technique import Fidelity, Slot, Technique, first_sentence

_NAME = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)


class RosterError(SnugfitError):
    """Error in a technique's file, which breaks a rule of the roster; the message is for its author."""


@functools.cache
def techniques() -> tuple[type[Technique], ...]:
    """Return all techniques, by slot (choice) in the order of a recipe. In a slot the default comes first,
    then the others by name.
    """
    root = Path(__file__).parent
    of_core = [
        (Slot(slot), f"{__package__}.{slot}.{entry.name}")
        for slot in _slots(root)
        # `iter_modules` lists files without importing them.
        for entry in pkgutil.iter_modules([str(root / slot)])
    ]
    classes = [
        _read(import_feature(module), slot, module.rpartition(".")[2])
        for slot, module in (*of_core, *technique_modules())
    ]
    for slot in Slot:
        defaults = [technique.name for technique in classes if technique.slot is slot and technique.plain]
        if len(defaults) != 1:
            raise RosterError(f"Slot {slot}: exactly one technique is plain, found {defaults or 'none'}.")
    names = [technique.name for technique in classes]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RosterError(
            f"Two techniques have one name: {sorted(twice)}. Names of techniques must differ, also in "
            "different slots. Rename the file of one of them."
        )
    order = list(Slot)
    return tuple(sorted(classes, key=lambda kind: (order.index(kind.slot), not kind.plain, kind.name)))


def find(word: str) -> type[Technique]:
    """Return the technique called `word`, in snugfit or in another library. Raises `RecipeError` with the
    most similar names.
    """
    named = {technique.name: technique for technique in techniques()}
    aliases = {_spelling(alias): technique for technique in named.values() for alias in technique.elsewhere}
    # Own names come before words of other libraries, which may be equal.
    if technique := (aliases | named).get(_spelling(word)):
        return technique
    if hint := advice(word) or advice(_spelling(word)):
        raise RecipeError(f"{word!r}: {hint}")
    guess = did_you_mean(word, named) or did_you_mean(word, aliases)
    guess = guess or _with_shared_words(word, named)
    raise RecipeError(f"Unknown technique {word!r}.{guess}")


@functools.cache  # of some 200 names, at each search
def _spelling(word: str) -> str:
    """Return the word in lower case with underscores: `gradient_checkpointing` for
    `gradient-checkpointing`."""
    return re.sub(r"[^a-z0-9]+", "_", word.lower())


def _with_shared_words(word: str, names: Iterable[str]) -> str:
    """Return a sentence that suggests up to three names which share parts with `word`: `adamw_8bit` for
    `8bit-adam`."""
    parts = [part for part in re.split(r"[^a-z0-9]+", word.lower()) if len(part) > 2]
    shared = {name: sum(part in name for part in parts) for name in names}
    # Names with more shared parts come first, then shorter names.
    best = sorted((name for name in shared if shared[name]), key=lambda name: (-shared[name], len(name)))[:3]
    guess = f" Did you mean {' or '.join(map(repr, best))}?" if best else ""
    return f"{guess} snugfit techniques lists all."


@functools.cache
def slots_of_several_gpus() -> tuple[Slot, ...]:
    """Return the slots (choices of a recipe) with techniques by which several GPUs train together."""
    slots = {technique.slot for technique in techniques() if technique.needs_several_gpus}
    return tuple(slot for slot in Slot if slot in slots)


@functools.cache
def plain(slot: Slot) -> Technique:
    """Return the default technique of a slot (a choice of a recipe), which plain PyTorch code uses."""
    return next(technique for technique in techniques() if technique.plain and technique.slot is slot)()


@dataclass(frozen=True, kw_only=True)
class SettingLine:
    """The name, values and default of one setting of a technique, for help and documentation."""

    name: str
    """Name of the setting's field, which a recipe has before the equals sign."""

    kind: str
    """Type of the setting in words."""

    default: str | None
    """Default value in the notation of recipes; None if the setting must be given."""

    sentence: str
    """First sentence of the field's docstring, which documentation and help print."""


def setting_lines(technique: type[Technique]) -> tuple[SettingLine, ...]:
    """Return a technique's settings in the order in which they are written by position."""
    kinds, sentences = setting_types(technique), _sentences(technique)
    return tuple(
        SettingLine(
            name=declared.name,
            kind=describe(kinds[declared.name]),
            default=None if declared.default is MISSING else show_setting(declared.default),
            sentence=sentences[declared.name],
        )
        for declared in fields(technique)
    )


def _sentences(technique: type[Technique]) -> dict[str, str]:
    """Return the first sentence of each setting's docstring, by the setting's name. Raises `RosterError` for
    settings without one.
    """
    # The check runs only if the sentences are needed, since reading them takes as long as loading all
    # techniques.
    docs = field_docs(technique)
    sentences = {declared.name: first_sentence(docs.get(declared.name, "")) for declared in fields(technique)}
    if undocumented := [name for name, sentence in sentences.items() if not sentence]:
        raise RosterError(
            f"{_location(technique)}: each setting has its sentence directly under it; "
            f"missing: {undocumented}."
        )
    return sentences


def _slots(root: Path) -> list[str]:
    folders = sorted(entry.name for entry in pkgutil.iter_modules([str(root)]) if entry.ispkg)
    legal = [slot.value for slot in Slot]
    if strange := [name for name in folders if name not in legal]:
        raise RosterError(f"Folders that are no slot: {strange}. Slots: {legal}.")
    return folders


def _read(module: ModuleType, slot: Slot, name: str) -> type[Technique]:
    """Return the one technique class of a module, after setting its name and slot and checking it."""
    classes = [
        value
        for value in vars(module).values()
        # A file may import another technique to derive from it.
        if inspect.isclass(value) and issubclass(value, Technique) and value.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise RosterError(f"{module.__name__}: one technique a file, found {len(classes)}.")
    technique = classes[0]
    # Name and slot come from the path, so they cannot contradict it.
    technique.name, technique.slot = name, slot
    _check_facts(technique, slot)
    return technique


def check(technique: type[Technique], *, slot: Slot | None) -> None:
    """Raise `RosterError` if a technique's class breaks a rule on which the rest of the code relies."""
    _check_facts(technique, slot)
    _sentences(technique)


def _location(technique: type[Technique]) -> str:
    return f"{technique.__module__}.{technique.__qualname__}"


def _check_facts(technique: type[Technique], slot: Slot | None) -> None:
    """Raise `RosterError` if a technique's name, slot, defaults or other class variables break a rule."""
    location = _location(technique)
    if slot not in list(Slot):
        raise RosterError(f"{location}: its slot is {slot!r}; slots: {[known.value for known in Slot]}.")
    if not _NAME.fullmatch(technique.name):
        raise RosterError(f"{location}: the name {technique.name!r} is not small letters, digits and '_'.")
    # A dataclass without a docstring gets its signature as one.
    if not technique.__doc__ or technique.__doc__.startswith(f"{technique.__name__}("):
        raise RosterError(f"{location}: the class needs a docstring.")
    if not technique.summary():
        raise RosterError(f"{location}: the docstring's first sentence must end in a full stop.")
    if not isinstance(getattr(technique, "fidelity", None), Fidelity):
        raise RosterError(
            f"{location}: it must have a `fidelity`, one of {[degree.name for degree in Fidelity]}."
        )
    if not getattr(technique, "source", "").strip():
        raise RosterError(f"{location}: it must have a `source`: a paper, or a library's class.")
    if technique.install is Technique.install and technique.value is Technique.value:
        raise RosterError(f"{location}: it must have a `value`, or an `install`.")
    if bool(technique.needs) != bool(technique.extra):
        raise RosterError(
            f"{location}: `needs` and `extra` must be given together: the extra installs these packages."
        )
    if technique.plain and any(declared.default is MISSING for declared in fields(technique)):
        raise RosterError(f"{location}: a plain technique has a default for each setting.")


def field_docs(kind: type[Any]) -> dict[str, str]:
    """Return the docstring directly under each field of a dataclass, fields of base classes included."""
    docs: dict[str, str] = {}
    names = {declared.name for declared in fields(kind)}
    # A subclass comes last, so its sentence replaces an inherited one.
    for owner in reversed(kind.__mro__):
        if names & set(vars(owner).get("__annotations__", ())):
            docs |= _class_field_docs(owner)
    return docs


def _class_field_docs(owner: type) -> dict[str, str]:
    """Return the string literal directly under each annotated field in this class's body."""
    # Docstrings below fields are no attributes, so they are read from the source.
    body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        # The literal must follow its field directly.
        for field, below in pairwise(body.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


# ---- words of other libraries ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ForeignNames:
    """The table of other libraries' names, read from `foreign_names.json`."""

    about: str
    """Sentence on the source of the names."""

    same: dict[str, str]
    """Keys of other libraries' configurations, each with the equivalent key of a job file."""

    keys: dict[str, str]
    """Further keys of other libraries' configurations, each with advice on a replacement in a job file."""

    techniques: dict[str, str]
    """Techniques of other libraries that snugfit does not have, each with the reason."""


@functools.cache
def foreign_names() -> ForeignNames:
    """Return the table of other libraries' names, read once a process."""
    text = files("snugfit.techniques").joinpath("foreign_names.json").read_text(encoding="utf-8")
    return ForeignNames(**json.loads(text))


def advice(word: str) -> str | None:
    """Return advice, as a clause, on another library's name in a recipe, such as `gradient_checkpointing`;
    None for an unknown name.
    """
    names = foreign_names()
    # Reasons against a technique come before advice for a similar one.
    for advised in (names.techniques, *(technique.advice for technique in techniques())):
        if word.lower() in advised:
            return advised[word.lower()]
    if word == "batch_size":
        return "it is part of the job, not of the recipe; 'micro_batches(n)' cuts the batch into n pieces."
    # Keys that mean a key of the job file, and fields of a job, are no techniques.
    if names.same.get(word, word) in {field.name for field in fields(Job)}:
        return "it is part of the job, not of the recipe."
    if word in names.keys:
        return f"this is an argument of another trainer, not a technique: {names.keys[word]}."
    return None
