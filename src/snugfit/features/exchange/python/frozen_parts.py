"""Parts of a model that a script freezes, as settings of the technique `frozen`.

A part is a path from the model (`model.bert.encoder.layer[:8]`), or the names of parameters that meet the
conditions around the statement (`if "classifier" not in name`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from snugfit.features.exchange.python.evaluate import CHOSEN
from snugfit.features.exchange.python.objects import MODEL, kind_of
from snugfit.features.exchange.python.values import Assignment, ForeignCall, Member, Name

METHODS = {
    "freeze_feature_encoder": "feature_extractor", "freeze_feature_extractor": "feature_extractor",
    "freeze_base_model": "base_model", "freeze_encoder": "encoder",
}  # fmt: skip
"""Methods of transformers' models that freeze parts, with the parts."""

MOST_LAYERS = 1000
"""Largest layer number in a slice."""

_LISTS = ("parameters", "named_parameters", "children", "named_children", "modules", "named_modules")
_SLICE = re.compile(r"\[(\d*):(\d*)\]")


@dataclass
class FrozenParts:
    """Collects a script's statements that freeze or train parts of the model, in their order."""

    freezes: list[str] = field(default_factory=list)
    trains: list[str] = field(default_factory=list)
    whole: list[tuple[int, str]] = field(default_factory=list)
    """Line and text of the statement by which the whole model froze first; empty without one."""

    def add(self, event: ForeignCall | Assignment, trains: bool) -> bool:
        """Add a statement. Return False if its part is not known, or if it overrides an earlier one."""
        target = event.target if isinstance(event, Assignment) else event.function.of
        if isinstance(event, ForeignCall) and event.name in METHODS:
            path: str | None = METHODS[event.name]
        else:
            path = path_of(target)
        if path is None:
            return False
        words = _words(path, event.tests)
        if words is None:
            return False
        # Scripts often freeze the whole model first, and then release parts.
        if not trains and words == [""] and not self.freezes and not self.trains:
            self.whole.append((event.line, event.text))
            return True
        if trains and not self.whole and self.freezes:
            return False
        (self.trains if trains else self.freezes).extend(words)
        return "" not in words and not (self.whole and not trains)

    @property
    def trains_nothing(self) -> bool:
        """Return True if the script froze the whole model and released nothing again."""
        return bool(self.whole) and not self.trains

    def settings(self) -> dict[str, Any]:
        """Return the arguments of `frozen`; empty if all parameters train."""
        given = {"frozen.only": self.trains if self.whole else [], "frozen.parts": self.freezes}
        parts = {key: tuple(dict.fromkeys(words)) for key, words in given.items() if words}
        return {"frozen": True, **parts} if parts else {}


def path_of(value: Any) -> str | None:
    """Return the path of the part of the model that a value is or lists, as a word or a pattern; empty for
    the whole.

    Return None for another value.
    """
    names = _names_to(value)
    if names is None:
        return None
    plain, pattern = "", ""
    for name in names:
        number = name.strip("[]")
        bounds = _SLICE.fullmatch(name)
        if name in ("[]", "[0]", "[1]") and not pattern:  # an element of a list of all parameters
            continue
        if name == "[]":
            continue
        if bounds:
            first, end = (int(text) if text else None for text in bounds.groups())
            if max(first or 0, end or 0) > MOST_LAYERS:
                return None
            if end is None:
                # A slice without an end means all numbers except those before it.
                skipped = "|".join(map(str, range(first or 0)))
                piece = rf"(?!(?:{skipped})[.])\d+" if skipped else r"\d+"
            else:
                piece = f"(?:{'|'.join(map(str, range(first or 0, end)))})"
            plain, pattern = "", f"{pattern}[.]{piece}"
        elif name.startswith("[") and not number.isdecimal():
            return None
        else:
            plain = f"{plain}.{number}" if pattern and plain else number if not pattern else ""
            pattern = f"{pattern}[.]{number}" if pattern else number
    return plain or (f".*{pattern}[.]" if pattern else "")


def _names_to(value: Any) -> list[str] | None:
    """Return the names of attributes and elements that lead from the model to a value; None for others."""
    names: list[str] = []
    while kind_of(value) != MODEL:
        if isinstance(value, ForeignCall) and isinstance(value.function, Member) and value.name in _LISTS:
            value = value.function.of
        elif isinstance(value, ForeignCall) and _passes_elements_on(value, names):
            names = ["[]", *names[2:]] if value.name == "enumerate" else names
            value = value.positional[0]
        elif isinstance(value, Member):
            names.insert(0, value.name)
            value = value.of
        else:
            return None
    return names


def takes_a_part(optimizer: ForeignCall) -> bool:
    """Return True for an optimizer of one part of the model. Several groups count as all parameters."""
    given = [*optimizer.positional[:1], optimizer.named.get("params"), optimizer.named.get("parameters")]
    groups = [one for one in given if one is not None]
    while len(groups) == 1 and isinstance(groups[0], list | tuple | dict):
        inner = groups[0]
        groups = [inner.get("params")] if isinstance(inner, dict) else [*inner]
    if len(groups) != 1:
        return False
    value = groups[0]
    if isinstance(value, Member) and value.name.startswith(CHOSEN):
        # This condition selects what trains anyway, and no part.
        return "requires_grad" not in value.name
    return bool(path_of(Member(value, "[]")))


def _passes_elements_on(call: ForeignCall, names: Sequence[str]) -> bool:
    """Return True for a Python function that passes on elements of its argument, if these names mean any
    element."""
    if not isinstance(call.function, Name) or len(call.positional) != 1 or names[:1] != ["[]"]:
        return False
    lists = call.function.dotted in ("list", "tuple", "reversed", "iter")
    return lists or (call.function.dotted == "enumerate" and names[1:2] == ["[1]"])


def _words(path: str, tests: Sequence[str]) -> list[str] | None:
    """Return the patterns of a part under these conditions on names; None for other conditions."""
    if not tests:
        return [path]
    if path or len(tests) > 1:
        return None
    try:
        return _of_test(ast.parse(tests[0], mode="eval").body)
    except SyntaxError:
        return None


def _of_test(test: ast.expr, *, negated: bool = False) -> list[str] | None:
    """Return the patterns of parameter names for which a condition holds; None for other conditions."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _of_test(test.operand, negated=not negated)
    if isinstance(test, ast.BoolOp):
        parts = [_of_test(one, negated=negated) for one in test.values]
        known = [word for part in parts if part is not None for word in part]
        if any(part is None for part in parts):
            return None
        # A negation exchanges `and` and `or` (De Morgan).
        if isinstance(test.op, ast.Or) is not negated:
            return known
        return ["".join(f"(?={word})" for word in known)] if all("|" not in one for one in known) else None
    inside: str | None = None
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.In | ast.NotIn):
        negated ^= isinstance(test.ops[0], ast.NotIn)
        inside = _text(test.left)
        inside = None if inside is None or not isinstance(test.comparators[0], ast.Name) else f".*{inside}"
    elif isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and len(test.args) == 1:
        inside = _text(test.args[0]) if test.func.attr == "startswith" else None
    if inside is None:
        return None
    return [f"(?!{inside})"] if negated else [f"(?:{inside})"]


def _text(node: ast.expr) -> str | None:
    # A recipe has its patterns in single quotes.
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and "'" not in node.value
    return re.escape(str(node.value)) if is_text and isinstance(node, ast.Constant) else None
