"""A checked file, put right: comments, order and everything that nothing was found about stay as they are.

The fixes are applied to the values first; where that leaves a top-level key with another name or value, gone,
or new, the text is edited at that place, and read again: it must say exactly those values. YAML that resists
(all in one line, say) is written anew, as JSON always is, which has no comments to lose; Python is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import yaml

from snugfit.errors import UsageError
from snugfit.exchange.check import Checked, Fix, check_document
from snugfit.exchange.document import Document, as_document
from snugfit.exchange.literal import literal
from snugfit.exchange.plain_text import LimitedLoader, load_yaml
from snugfit.exchange.python_call import read_script

ROUNDS = 4
"""Fixes that bring others to light come to an end sooner; this is for a rule that contradicts another."""

Edit = tuple[int, int, bytes]
"""From, to (byte offsets), and what stands there instead."""

_ALONE = re.compile(rb"[ \t]*,?[ \t]*(?:#[^\n]*)?\r?\n")
_BEHIND = re.compile(rb"[ \t]*,[ \t]*")
"""What goes with an argument that goes: its comma, and a comment on a line of its own."""


def corrected(checked: Checked) -> str:
    """The text of the file with every fix applied, and those that only then come to light."""
    text = checked.document.text
    for _ in range(ROUNDS):
        if not any(finding.fix for finding in checked.findings):
            break
        text = _mended(checked)
        try:
            checked = check_document(as_document(checked.document.path, text))
        except UsageError:  # nothing of the configuration is left
            break
    return text


def _mended(checked: Checked) -> str:
    document = checked.document
    values, renamed = _apply(document.values, [one.fix for one in checked.findings if one.fix])
    if document.format == "json":
        return json.dumps(values, indent=2) + "\n"
    where = str(document.path)
    if document.format == "yaml":
        text = _edit_yaml(document, values, renamed)
        return text if _says(lambda: load_yaml(text, where), values) else _whole_yaml(values)
    script = _edit_python(document, values, renamed)
    if not _says(lambda: read_script(script, where).arguments, values):
        raise UsageError(f"{where}: too entangled to be edited. Change what was found by hand.")
    return script


def _says(read: Callable[[], Any], values: Mapping[str, Any]) -> bool:
    try:
        return bool(read() == values)
    except UsageError:
        return False


def _whole_yaml(values: Mapping[str, Any]) -> str:
    written: str = yaml.safe_dump(dict(values), sort_keys=False)
    return written


def _apply(values: Mapping[str, Any], fixes: Sequence[Fix]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values after all fixes, and the top-level keys that have another name then."""
    new: dict[str, Any] = deepcopy(dict(values))
    renamed: dict[str, str] = {}
    for fix in fixes:
        for key, value in fix.set.items():
            _put(new, key.split("."), value)
    for fix in fixes:  # afterwards, for what goes needs no better value
        for key in fix.remove:
            _drop(new, key.split("."))
    for fix in fixes:
        renamed |= {old: name for old, name in fix.rename.items() if old in new}
    return {renamed.get(key, key): value for key, value in new.items()}, renamed


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


def _edit_yaml(document: Document, values: Mapping[str, Any], renamed: Mapping[str, str]) -> str:
    text = document.text
    root = LimitedLoader(text).get_single_node()
    assert isinstance(root, yaml.MappingNode)
    edits: list[tuple[int, int, str]] = []
    for key_node, value_node in root.value:
        key, start = str(key_node.value), key_node.start_mark.index
        name = renamed.get(key, key)
        end = start + len(text[start : value_node.end_mark.index].rstrip())
        if name not in values:
            line_end = text.find("\n", end)
            edits.append((start, len(text) if line_end < 0 else line_end + 1, ""))
        elif values[name] != document.values[key]:
            edits.append((start, end, f"{name}: {_as_yaml(values[name])}"))
        elif name != key:
            edits.append((start, key_node.end_mark.index, name))
    for start, end, instead in sorted(edits, reverse=True):
        text = text[:start] + instead + text[end:]
    new = [name for name in values if name not in document.values and name not in renamed.values()]
    if new and text and not text.endswith("\n"):
        text += "\n"
    return text + "".join(f"{name}: {_as_yaml(values[name])}\n" for name in new)


def _as_yaml(value: Any) -> str:
    written: str = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return written.removesuffix("...\n").strip()


def _edit_python(document: Document, values: Mapping[str, Any], renamed: Mapping[str, str]) -> str:
    script, text = document.script, document.text.encode()
    assert script is not None
    edits: list[Edit] = []
    for key, place in script.places.items():
        name = renamed.get(key, key)
        if name not in values:
            edits.append(_without(text, place.name[0], place.value[1]))
            continue
        if name != key:
            edits.append((*place.name, (literal(name) if place.quoted else name).encode()))
        if values[name] != document.values[key]:
            edits.append((*place.value, literal(values[name]).encode()))
    new = [name for name in values if name not in document.values and name not in renamed.values()]
    if new and script.end is not None:
        more = "".join(f", {name}={literal(values[name])}" for name in new)
        edits.append((script.end, script.end, more.encode()))
    begun = len(text)
    for start, end, instead in sorted(edits, reverse=True):  # two that go may share the comma between them
        text = text[:start] + instead + text[min(end, begun) :]
        begun = start
    return text.decode()


def _without(text: bytes, start: int, end: int) -> Edit:
    """The argument with its comma: the whole line where nothing else stands on it; otherwise with the comma
    behind it, or, for the last one, with the one before."""
    line = text.rfind(b"\n", 0, start) + 1
    alone = _ALONE.match(text, end)
    if alone and not text[line:start].strip():
        return line, alone.end(), b""
    if behind := _BEHIND.match(text, end):
        return start, behind.end(), b""
    before = text[:start].rstrip()
    return (len(before) - 1 if before.endswith(b",") else start), end, b""
