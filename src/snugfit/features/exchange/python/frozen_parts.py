"""Parts of a model that a script freezes, as settings of snugfit's technique `frozen`.

A part is a path from the model (`model.bert.encoder.layer[:8]`), or the names of parameters that meet the
conditions around the statement (`if "classifier" not in name`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from snugfit.features.exchange.dialect import words_of
from snugfit.features.exchange.python.evaluate import CHOSEN
from snugfit.features.exchange.python.objects import MODEL, kind_of
from snugfit.features.exchange.python.values import Assignment, ForeignCall, Member, Name, replace_names

MOST_LAYERS = 1000
"""Largest layer number that a slice of layers in a script may contain."""

_LISTS = ("parameters", "named_parameters", "children", "named_children", "modules", "named_modules")
_LOOPS = (ast.GeneratorExp, ast.ListComp)
_SLICE = re.compile(r"\[(\d*):(\d*)\]")
_LAST = re.compile(r"\[-(\d+):?\]")
_ALL_BUT_LAST = re.compile(r"\[0?:-(\d+)\]")


@dataclass
class FrozenParts:
    """Collects a script's statements that freeze or train parts of the model, in their order."""

    freezes: list[str] = field(default_factory=list)
    trains: list[str] = field(default_factory=list)
    whole: list[tuple[int, str]] = field(default_factory=list)
    """Line and text of the first statement that freezes the whole model; empty without one."""
    beside: list[str] = field(default_factory=list)
    """Name patterns of all parameters outside of the layers, if only the last layers train."""
    last: int = 0
    """Number of the model's last layers that train; 0 without such a selection."""

    def add(self, event: ForeignCall | Assignment, trains: bool) -> bool:
        """Record a statement that freezes or trains a part of the model. Return False if the part is unknown,
        or the statement overrides an earlier one.
        """
        target = event.target if isinstance(event, Assignment) else event.of
        if (added := self._add_last(target, event.tests, trains)) is not None:
            return added
        if isinstance(event, ForeignCall) and event.name in words_of("freezing methods"):
            path: str | None = words_of("freezing methods")[event.name]
        else:
            path = path_of(target)
        if path is None:
            return False
        words = _words(path, event.tests)
        if words is None:
            return False
        # Scripts often freeze the whole model first, and then unfreeze parts.
        if not trains and words == [""] and not self.freezes and not self.trains:
            self.whole.append((event.line, event.text))
            return True
        if trains and not self.whole and self.freezes:
            return False
        (self.trains if trains else self.freezes).extend(words)
        return "" not in words and not (self.whole and not trains)

    def _add_last(self, target: Any, tests: Sequence[str], trains: bool) -> bool | None:
        """Record a statement on the last layers of a list, if they train and all others are frozen. Return
        None for other parts of the model.
        """
        names = _names_to(target) or []
        form = _LAST if trains else _ALL_BUT_LAST
        number = next((at for at, name in enumerate(names) if form.fullmatch(name)), None)
        if number is None:
            return None
        layers = "[.]".join(names[:number])
        count = int(form.fullmatch(names[number])[1])  # type: ignore[index]
        is_list = layers and set(names[number + 1 :]) <= {"[]", "[1]"} and not tests
        if not is_list or count == 0 or self.last not in (0, count) or trains is not bool(self.whole):
            return False
        self.last = count
        if not trains:
            self.beside.append(f"(?!.*{layers}[.])")
        return len(self.beside) < 2

    @property
    def trains_nothing(self) -> bool:
        """Return True if the script froze the whole model and unfroze no part afterwards."""
        return bool(self.whole) and not self.trains and not self.last

    def settings(self) -> dict[str, Any]:
        """Return the settings of the technique `frozen` for the script's frozen parts; empty if all
        parameters train.
        """
        given = {"frozen.only": self.trains if self.whole else self.beside, "frozen.parts": self.freezes}
        parts: dict[str, Any] = {key: tuple(dict.fromkeys(words)) for key, words in given.items() if words}
        parts |= {"frozen.last": self.last} if self.last else {}
        return {"frozen": True, **parts} if parts else {}


def path_of(value: Any) -> str | None:
    """Return the path of the model part (a module or its parameters) that this value of the script refers to.

    The path is a word or a pattern, and empty for the whole model. Return None for any other value.
    """
    names = _names_to(value)
    if names is None:
        return None
    plain, pattern = "", ""
    for name in names:
        number = name.strip("[]")
        bounds = _SLICE.fullmatch(name)
        if name in ("[]", "[0]", "[1]") and not pattern:  # an element of the list of all parameters
            continue
        if name == "[]":
            continue
        if bounds:
            first, end = (int(text) if text else None for text in bounds.groups())
            if max(first or 0, end or 0) > MOST_LAYERS:
                return None
            if end is None:
                # A slice without an end selects all layers except those before its start.
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
    """Return the attribute names and indices that lead from the model to a value of the script; None for
    other values.
    """
    names: list[str] = []
    while kind_of(value) != MODEL:
        if isinstance(value, ForeignCall) and isinstance(value.function, Member) and value.name in _LISTS:
            value = value.of
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
    """Return True if an optimizer's parameter groups, by the names in the script, contain only some of the
    parameters.
    """
    given = [*optimizer.positional[:1], optimizer.named.get("params"), optimizer.named.get("parameters")]
    groups = [one for one in given if one is not None]
    while len(groups) == 1 and isinstance(groups[0], list | tuple | dict):
        inner = groups[0]
        groups = [inner.get("params")] if isinstance(inner, dict) else [*inner]
    groups = [one.get("params") if isinstance(one, dict) else one for one in groups]
    paths = [path_of(Member(one.of if _is_chosen(one) else one, "[]")) for one in groups]
    tests = [_condition(one) for one in groups]
    if None in paths or ("", "") in zip(paths, tests, strict=True):
        return False
    if any(tests):
        # Two opposite conditions select all parameters.
        plain = {test: test.replace(" not in ", " in ").removeprefix("not ") for test in tests if test}
        return len({*plain.values()}) == len(plain)
    # A base model and its head are all parts of a model, while an encoder alone is only one half.
    halves = {"encoder", "decoder"} & set(paths)
    return len(set(paths)) < 2 or len(halves) == 1 or any("." in str(path) for path in paths)


def _is_chosen(value: Any) -> bool:
    return isinstance(value, Member) and value.name.startswith(CHOSEN)


def _condition(value: Any) -> str:
    """Return the condition by which a loop of the script selects parameters or modules. A condition on
    `requires_grad` counts as none.
    """
    text = value.name.removeprefix(CHOSEN).removesuffix("]") if _is_chosen(value) else ""
    return " and ".join(part for part in text.split(" and ") if "requires_grad" not in part)


def _passes_elements_on(call: ForeignCall, names: Sequence[str]) -> bool:
    """Return True for a call such as `list(layers)` or `enumerate(layers)`, whose result has the elements of
    its argument.
    """
    if not isinstance(call.function, Name) or len(call.positional) != 1 or names[:1] != ["[]"]:
        return False
    lists = call.function.dotted in ("list", "tuple", "reversed", "iter")
    return lists or (call.function.dotted == "enumerate" and names[1:2] == ["[1]"])


def _words(path: str, tests: Sequence[str]) -> list[str] | None:
    """Return patterns for the names of a model part's parameters that meet these conditions; None for other
    conditions.
    """
    if not tests:
        return [path]
    if path:
        return None
    try:
        return _of_test(ast.parse(" and ".join(f"({test})" for test in tests), mode="eval").body)
    except SyntaxError:
        return None


def _of_test(test: ast.expr, *, negated: bool = False) -> list[str] | None:
    """Convert a Python condition on a parameter's name to patterns of matching names; None if that is
    impossible. `negated` inverts the condition.
    """
    test = _as_alternatives(test)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _of_test(test.operand, negated=not negated)
    if isinstance(test, ast.BoolOp):
        parts = [_of_test(one, negated=negated) or [] for one in test.values]
        if not all(parts):
            return None
        # A negation exchanges `and` and `or` (De Morgan).
        if isinstance(test.op, ast.Or) is not negated:
            return [word for part in parts for word in part]
        return ["".join(f"(?={'|'.join(part)})" for part in parts)]
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


def _as_alternatives(test: ast.expr) -> ast.expr:
    """Rewrite `any(...)` over a list of texts, and `startswith` of several, as conditions joined by `or`.

    Return any other condition unchanged.
    """
    if not isinstance(test, ast.Call) or len(test.args) != 1:
        return test
    [of], function = test.args, test.func
    parts: list[ast.expr] = []
    if isinstance(function, ast.Name) and function.id == "any" and isinstance(of, _LOOPS):
        [first, *more] = of.generators
        words = first.iter.elts if isinstance(first.iter, ast.List | ast.Tuple) else []
        if not more and not first.ifs and isinstance(first.target, ast.Name):
            parts = [replace_names(of.elt, {first.target.id: word}) for word in words]
    elif isinstance(function, ast.Attribute) and isinstance(of, ast.Tuple | ast.List):
        parts = [ast.Call(func=function, args=[word], keywords=[]) for word in of.elts]
    return ast.BoolOp(op=ast.Or(), values=parts) if parts else test


def _text(node: ast.expr) -> str | None:
    # Patterns are in single quotes in a recipe.
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and "'" not in node.value
    return re.escape(str(node.value)) if is_text and isinstance(node, ast.Constant) else None
