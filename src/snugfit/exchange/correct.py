"""What to change in a checked file, as a unified diff: snugfit writes into nobody's file.

The fixes are applied to the values, not to the text. So the diff is between two plain listings of the same
keys, one line or a few lines each, and not between the user's own lines: comments and layout are not in it,
and it is for reading rather than for `patch`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import yaml

from snugfit.exchange.check import Checked, Fix, check_document
from snugfit.exchange.document import Document
from snugfit.exchange.python_call import WIDENS
from snugfit.step.wishes.python_text import literal

NO_ARGUMENTS = ("job.", "parallel.", "adapters_dtype", WIDENS)
"""What is known of a script beside the arguments that stand in it."""

ROUNDS = 4
"""Fixes that bring others to light come to an end sooner; this is for a rule that contradicts another."""


def difference(checked: Checked) -> str:
    """The unified diff of the file's values before and after every fix; empty where nothing can be fixed."""
    before, after = checked.document, correct(checked)
    lines = difflib.unified_diff(
        _listing(before), _listing(after), str(before.path), f"{after.path} (corrected)", lineterm="", n=1
    )
    # the listings' line numbers are not the file's
    return "".join("@@\n" if line.startswith("@@") else f"{line}\n" for line in lines)


def correct(checked: Checked) -> Document:
    """The file with every fix applied to its values, and those that only then come to light."""
    for _ in range(ROUNDS):
        fixes = [finding.fix for finding in checked.findings if finding.fix]
        if not fixes:
            break
        values = _apply(checked.document.values, fixes)
        checked = check_document(replace(checked.document, values=values))
    return checked.document


def _listing(document: Document) -> list[str]:
    """The values as lines of the file's own format."""
    if document.format == "json":
        return json.dumps(document.values, indent=2).splitlines()
    if document.format == "yaml":
        return str(yaml.safe_dump(document.values, sort_keys=False)).splitlines()
    return [
        f"{key}," if key.startswith("**") else f"{key}={literal(value)},"
        for key, value in document.values.items()
        if not key.startswith(NO_ARGUMENTS)
    ]


def _apply(values: Mapping[str, Any], fixes: Sequence[Fix]) -> dict[str, Any]:
    """The values after all fixes."""
    new: dict[str, Any] = deepcopy(dict(values))
    renamed: dict[str, str] = {}
    for fix in fixes:
        for key, value in fix.set.items():
            _put(new, key.split("."), value)
    for fix in fixes:  # afterwards, because what goes needs no better value
        for key in fix.remove:
            _drop(new, key.split("."))
    for fix in fixes:
        renamed |= {old: name for old, name in fix.rename.items() if old in new}
    return {renamed.get(key, key): value for key, value in new.items()}


def _put(values: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        inner = values.get(name)
        values[name] = values = inner if isinstance(inner, dict) else {}
    values[path[-1]] = value


def _drop(values: dict[str, Any], path: list[str]) -> None:
    for name in path[:-1]:
        inner = values.get(name)
        if not isinstance(inner, dict):
            return
        values = inner
    values.pop(path[-1], None)
