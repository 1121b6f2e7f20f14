"""Conflicts, settings without effect, and renamed keys in a user's configuration.

`dialects/findings.json` lists known problems with their sources, and this file finds them. A name is reported
as removed only if the installed library does not have it either.

    conflict    the library will refuse it, or the run will fail
    unknown     the installed version has no such name
    renamed     the setting has another name
    removed     the setting no longer exists
    no effect   the setting changes nothing with the others of this file
    trap        the setting does something else than most people expect
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Group, RenderableType

from snugfit.documents import JsonDocument
from snugfit.errors import did_you_mean
from snugfit.features.exchange import installed
from snugfit.features.exchange.dialect import as_word, dialect, every_key, flatten, load_table
from snugfit.features.exchange.document import Document, open_document
from snugfit.features.exchange.python.meaning import WIDENS
from snugfit.features.exchange.python.values import Unknown
from snugfit.features.exchange.values import wrong_values
from snugfit.report.text.table import table
from snugfit.report.text.terminal import words

_CONDITIONS: Mapping[str, Callable[[Any, Any, Mapping[str, Any]], bool]] = {
    "not": lambda value, listed, force: value not in listed,
    "in": lambda value, listed, force: value in listed,
    "above": lambda value, bound, force: isinstance(value, int | float) and value > bound,
    "like": lambda value, pattern, force: fnmatchcase(str(value), pattern),
    "unlike": lambda value, patterns, force: not any(fnmatchcase(str(value), one) for one in patterns),
    "matches": lambda value, pattern, force: re.search(pattern, str(value), re.IGNORECASE) is not None,
    "times": lambda value, pair, force: _is_times(value, force.get(pair[0]), pair[1]),
    "known": lambda value, listed, force: not isinstance(value, str),
    "unequal": lambda value, other, force: bool(value != force.get(other)),
}
"""Functions that check a rule's condition. Arguments are a value, the rule's operand, and all values of the
file with defaults.
"""

OF_READER = (WIDENS, "adapters_dtype", "frozen")
"""Keys that snugfit's reader of scripts adds. They are not arguments of a library."""

_OF_EVALUATION = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "eval_strategy": "no"}
"""Defaults of `TrainingArguments` for rules about evaluation. They are copied here because the import takes
seconds.
"""

_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

_EXPONENT = re.compile(r"[-+]?\d+e[-+]?\d+", re.IGNORECASE)
"""Regular expression of a number that YAML 1.1 (and PyYAML) reads as text: without a point before the
exponent.
"""


@dataclass(frozen=True, kw_only=True)
class Fix:
    """Edits of a configuration file that repair one problem: keys to set, to remove and to rename."""

    set: Mapping[str, Any] = field(default_factory=dict)
    """New values of the file's settings, by dotted key."""

    remove: tuple[str, ...] = ()
    """Dotted keys to delete from the file."""

    rename: Mapping[str, str] = field(default_factory=dict)
    """New names of top-level keys, by old name. The values stay."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One problem of a configuration file, such as two contradicting keys or a key without effect."""

    kind: str
    """Kind of the problem: `conflict`, `unknown`, `renamed`, `removed`, `no effect` or `trap`."""

    keys: tuple[str, ...]
    """Keys of the file that have the problem."""

    says: str
    """Description of the problem, with the value to write instead."""

    fix: Fix | None = None
    """Changes to the file that solve the problem; None if only the user can decide."""


@dataclass(frozen=True, kw_only=True)
class Checked(JsonDocument):
    """A configuration file with the problems that `snugfit check` found in it."""

    what: ClassVar = "check"

    path: str
    """Path of the checked file."""

    kind: str
    """Library and class that the file configures, for messages."""

    findings: tuple[Finding, ...]
    """Problems found, sorted by kind and then by position in the file."""

    unread: tuple[str, ...]
    """Arguments that a script computes while it runs. They are not checked."""


def check(path: Path) -> Checked:
    """Return the configuration file at `path` with its problems. Raises `UsageError` for a file that is not a
    configuration.
    """
    return check_document(open_document(path))


def check_document(document: Document) -> Checked:
    """Return a configuration file, which was read before, with its problems."""
    facts = _facts(document.dialect)
    values = document.values
    findings = [*_find_renamed(values, facts), *_find_removed(values, facts)]
    findings += [*_find_old_values(document, facts), *_find_unknown(document, facts)]
    findings += [*_find_wrong_batches(document), *_find_wrong_mesh(document)]
    if document.dialect == "trainer":
        known = {key for finding in findings for key in finding.keys}
        wrong = ((key, says) for key, says in wrong_values(values) if key not in known)
        findings += [Finding(kind="conflict", keys=(key,), says=says) for key, says in wrong]
    if document.format != "python" or document.dialect in (
        "trainer",
        "sft",
        "loop",
    ):  # the other rules are about whole files
        findings += _apply_rules(document, facts)
    kinds = ("conflict", "unknown", "renamed", "removed", "no effect", "trap")
    return Checked(
        path=str(document.path),
        kind=dialect(document.dialect).title,
        findings=tuple(sorted(findings, key=lambda one: kinds.index(one.kind))),
        unread=tuple(
            key if key.startswith("**") else f"{key}={value}"
            for key, value in flatten(values)
            if isinstance(value, Unknown)
        ),
    )


@cache
def _facts(name: str) -> dict[str, Any]:
    nothing: dict[str, Any] = {"renamed": {}, "removed": {}, "values": {}, "rules": []}
    facts: dict[str, Any] = load_table("findings").get(name, nothing)
    return facts


@cache
def _installed_names(name: str) -> frozenset[str]:
    """Return the argument names of the installed library called `name`; empty if it accepts any name."""
    if name == "trainer":
        return frozenset(installed.defaults())
    if name == "accelerate" and find_spec("accelerate"):
        from dataclasses import fields

        installed.defer_rare_imports()
        from accelerate.commands.config.config_args import ClusterConfig

        return frozenset(one.name for one in fields(ClusterConfig))
    return frozenset()


def _find_renamed(values: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[Finding]:
    known = _installed_names("trainer") if facts is _facts("trainer") else frozenset()
    for old, entry in facts["renamed"].items():
        new, translated = entry["to"], entry.get("values")
        if old not in values or (known and new not in known):
            continue
        if known and old in known and (not entry.get("alias") or new in values or values[old] is None):
            continue  # the installed version knows this name, or knows both and uses the newer one
        note = f"; {entry['note']}" if "note" in entry else ""
        value = as_word(values[old])
        fix: Fix | None = Fix(remove=(old,))
        if translated is None and new not in values:
            fix = Fix(rename={old: new})
        elif translated and isinstance(values[old], Unknown):
            fix = None
        elif translated and value in translated and new not in values:
            fix = Fix(remove=(old,), set={new: translated[value]})
            note = f"={translated[value]!r}"
        yield Finding(kind="renamed", keys=(old,), says=f"its name is {new}{note}", fix=fix)


def _find_removed(values: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[Finding]:
    known = _installed_names("trainer") if facts["removed"] else frozenset()
    for name, why in facts["removed"].items():
        if name in values and name not in known:
            yield Finding(kind="removed", keys=(name,), says=why, fix=Fix(remove=(name,)))


def _find_old_values(document: Document, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each renamed value of a configuration, and each number that YAML reads as text."""
    for key, meanings in facts["values"].items():
        value = document.values.get(key)
        if isinstance(value, str) and value in meanings:
            new = meanings[value]
            yield Finding(kind="renamed", keys=(key,), says=f"{value} is {new} now", fix=Fix(set={key: new}))
    for key, value in flatten(document.values) if document.format == "yaml" else ():
        if isinstance(value, str) and _EXPONENT.fullmatch(value):
            says = (
                f"YAML reads {value} as text, because there is no decimal point: {float(value)!r} is read "
                "as a number"
            )
            yield Finding(kind="trap", keys=(key,), says=says, fix=Fix(set={key: float(value)}))


def _find_unknown(document: Document, facts: Mapping[str, Any]) -> Iterator[Finding]:
    known = _installed_names(document.dialect)
    if not known or (document.format == "python" and document.dialect != "trainer"):
        return
    reported = {*facts["renamed"], *facts["removed"], "dynamo_backend"}
    known_elsewhere = {"predict_with_generate", "sortish_sampler"}
    fine = known | reported | known_elsewhere
    for key in document.values:
        if key in fine or key in OF_READER or "." in key or key.startswith(("*", "generation_")):
            continue
        says = f"{_library(document.dialect)} has no such argument.{did_you_mean(key, known)}"
        yield Finding(kind="unknown", keys=(key,), says=says)


def _library(name: str) -> str:
    from importlib.metadata import version

    return installed.version() if name == "trainer" else f"{name} {version(name)}"


def _find_wrong_batches(document: Document) -> Iterator[Finding]:
    """Yield a finding if DeepSpeed's train batch size is not the product of micro-batch, accumulation and
    GPUs."""
    if (numbers := _batches(document)) and numbers[0] % (numbers[1] * numbers[2]):
        says = f"{numbers[0]} samples cannot be split evenly over GPUs with {numbers[1]} x {numbers[2]} each"
        yield Finding(kind="conflict", keys=_BATCHES, says=says, fix=Fix(remove=_BATCHES[:1]))


def _batches(document: Document) -> list[int]:
    """Return the three batch sizes of a DeepSpeed configuration: samples of a step, samples of a micro-batch,
    and number of micro-batches. Empty without them.
    """
    numbers = [one for one in map(document.values.get, _BATCHES) if type(one) is int and one > 0]
    return numbers if document.dialect == "deepspeed" and len(numbers) == len(_BATCHES) else []


def _find_wrong_mesh(document: Document) -> Iterator[Finding]:
    """Yield a finding if the axes of accelerate's mesh do not multiply to the number of processes."""
    mesh, processes = document.values.get("parallelism_config"), document.values.get("num_processes")
    if document.dialect != "accelerate" or not isinstance(mesh, Mapping) or type(processes) is not int:
        return
    sizes = {key: value for key, value in mesh.items() if key.endswith("_size") and type(value) is int}
    if sizes and (number := math.prod(sizes.values())) != processes:
        says = f"its sizes multiply to {number}, and num_processes is {processes}"
        yield Finding(kind="conflict", keys=tuple(f"parallelism_config.{key}" for key in sizes), says=says)


def _apply_rules(document: Document, facts: Mapping[str, Any]) -> Iterator[Finding]:
    renamed = {old: entry["to"] for old, entry in facts["renamed"].items() if "values" not in entry}
    # Rules use the new names, and a finding names the key as it is in the file.
    own = {new: old for old, new in renamed.items() if old in document.values and new not in document.values}
    given = {renamed.get(key, key): value for key, value in document.values.items() if value is not None}
    usual = _defaults_of(document.dialect)
    given = dict(every_key(given))
    adapters = any(key.startswith(("lora.", "unsloth.")) for key in document.values)
    force = {**usual, **given, "adapters": adapters}
    if numbers := _batches(document):
        force["processes"] = numbers[0] // (numbers[1] * numbers[2])
    for rule in facts["rules"]:
        when = rule.get("when", {})
        named = rule.get("given", [])
        if not all(key in given and given[key] != usual.get(key) for key in named):
            continue
        if not all(_holds(condition, force.get(key), force) for key, condition in when.items()):
            continue
        keys = [rule["key"]] if "key" in rule else [*named, *(key for key in when if key in given)]
        yield Finding(
            kind=rule["kind"],
            keys=tuple(dict.fromkeys(_in_file(key, own) for key in keys)),
            says=rule["says"],
            fix=_fix(rule.get("fix"), force, own),
        )


def _defaults_of(name: str) -> dict[str, Any]:
    """Return the default value of each argument that this library's configuration files may have."""
    if name in ("sft", "llamafactory"):
        return dict(_OF_EVALUATION)
    if name != "trainer":
        return {}
    return {
        **installed.defaults(),
        "activation_checkpointing": False,
        "activation_checkpointing_kwargs": None,
    }


def _holds(condition: Any, value: Any, force: Mapping[str, Any]) -> bool:
    """Return True if a configuration value meets a rule's condition. A condition is an equal value, or one of
    the words of `_CONDITIONS`.
    """
    if isinstance(value, Unknown):
        return False
    if not isinstance(condition, Mapping):
        # Python has True == 1, and a rule for 1 must not apply to True.
        return bool(value == condition) and isinstance(value, bool) == isinstance(condition, bool)
    ((word, operand),) = condition.items()
    return _CONDITIONS[word](value, operand, force)


def _is_times(value: Any, other: Any, factor: int) -> bool:
    """Return True if a numeric setting is at least `factor` times another setting."""
    return type(value) is int and type(other) is int and 0 < other * factor <= value


def _fix(fix: Mapping[str, Any] | None, force: Mapping[str, Any], own: Mapping[str, str]) -> Fix | None:
    if fix is None:
        return None
    values = {**fix.get("set", {}), **{key: force[other] for key, other in fix.get("copy", {}).items()}}
    values |= {new: force[old] for old, new in fix.get("move", {}).items()}
    return Fix(
        set={_in_file(key, own): value for key, value in values.items()},
        remove=tuple(_in_file(key, own) for key in [*fix.get("remove", ()), *fix.get("move", {})]),
    )


def _in_file(key: str, own: Mapping[str, str]) -> str:
    """Return the name under which the file has this key, which may be an old name."""
    head, dot, rest = key.partition(".")
    return f"{own.get(head, head)}{dot}{rest}"


def render_check(checked: Checked) -> RenderableType:
    """Return the problems of a checked file as terminal output, the most severe first, each with its fix."""
    head = f"{checked.path} ({checked.kind})"
    unread = [
        words(f"Not checked, because the script computes it while it runs: {', '.join(checked.unread)}.")
    ]
    notes = unread if checked.unread else []
    if not checked.findings:
        return Group(words(f"{head}: nothing found."), *notes)
    rows = [(one.kind, ", ".join(one.keys), one.says, _cure(one)) for one in checked.findings]
    count = f"{len(rows)} finding{'s' if len(rows) > 1 else ''}"
    return Group(words(f"{head}: {count}."), table(("Kind", "What", "Why", "Cure"), rows), *notes)


def _cure(finding: Finding) -> str:
    fix = finding.fix
    if fix is None:
        return "by hand"
    done = [f"rename {old} to {new}" for old, new in fix.rename.items()]
    done += [f"remove {key}" for key in fix.remove]
    done += [f"write {key}={as_word(value)}" for key, value in fix.set.items()]
    return "; ".join(done)
