"""Statements that may change a step: calls and assignments that touch the model, the trainer, or torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from snugfit.features.exchange.python.objects import (
    ARGUMENTS,
    MODEL,
    OPTIMIZER,
    PART,
    TOKENIZER,
    TRAINER,
    kind_of,
    may_be_part,
)
from snugfit.features.exchange.python.values import Assignment, Class, ForeignCall, Member, Name


def touches(event: ForeignCall | Assignment) -> bool:
    """Return True for a statement that may change a step."""
    return _is_relevant_call(event) if isinstance(event, ForeignCall) else _is_relevant_assignment(event)


@cache
def _harmless() -> Mapping[str, list[str]]:
    """Return methods, functions, attributes and variables without effect on a step."""
    text = files("snugfit.features.exchange.python").joinpath("harmless.json").read_text(encoding="utf-8")
    table: Mapping[str, list[str]] = json.loads(text)
    return table


def _is_relevant_call(call: ForeignCall) -> bool:
    table = _harmless()
    if isinstance(call.function, Member):
        of = kind_of(call.function.of)
        if not of and call.name == "requires_grad_":
            return may_be_part(call.function.of)
        # The statements of the script's own methods are read instead of a call.
        own = call.name in getattr(getattr(call.function.of, "function", None), "methods", ())
        harmless = {MODEL: MODEL, TRAINER: TRAINER, OPTIMIZER: OPTIMIZER, PART: "part"}.get(of)
        return harmless is not None and not own and not _is_in(call.name, table[harmless])
    if not isinstance(call.function, Name):
        return False
    if call.library == "torch" and _is_in(call.function.dotted, table["torch switches"]):
        return True
    known = _is_in(call.name, table["functions"]) or kind_of(call) or call.name in ARGUMENTS
    values = (*call.positional, *call.named.values())
    return not known and any(kind_of(value) in (MODEL, OPTIMIZER) for value in values)


def _is_relevant_assignment(one: Assignment) -> bool:
    table = _harmless()
    if isinstance(one.target, Name):
        if one.target.dotted == "os.environ":
            return not _is_in(one.name, table["environment"])
        dotted = f"{one.target.dotted}.{one.name}"
        return dotted.startswith("torch.") and not _is_in(dotted, table["torch attributes"])
    kind = kind_of(one.target)
    if kind == TOKENIZER:
        return False
    if isinstance(getattr(one.target, "function", None), Class):  # `self` of a trainer's methods
        return one.name in (MODEL, OPTIMIZER)
    if not kind and one.name == "requires_grad":
        return may_be_part(one.target)
    return kind in (MODEL, PART, TRAINER, OPTIMIZER) and not _is_in(one.name, table["attributes"])


def _is_in(name: str, patterns: list[str]) -> bool:
    from fnmatch import fnmatchcase

    return any(fnmatchcase(name, one) for one in patterns)
