"""Convert values and calls to Python text for exported scripts. Strings have double quotes, as code
formatters write them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snugfit.techniques.setup import Call

_OWN = "snugfit."


def literal(value: Any) -> str:
    """Return a Python expression for a value: text, numbers, truth values, lists and mappings of these."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(key)}: {literal(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    written = repr(value)
    if isinstance(value, str) and written.startswith("'") and '"' not in value:
        return f'"{written[1:-1]}"'
    return written


@dataclass(frozen=True, kw_only=True)
class CallText:
    """A call of another library's function with its arguments, as Python text."""

    imported: str
    """Line of Python that imports the function."""

    called: str
    """Python expression that calls the function."""


def call_text(call: Call, first: str) -> CallText | None:
    """Return the Python text of a call, with `first` as its positional arguments. None for a function of
    snugfit's own, which a script without snugfit does not have.
    """
    if call.path.startswith(_OWN):
        return None
    module, _, name = call.path.partition(":")
    called = f"{name}({first}{keywords_text(call.arguments)})"
    return CallText(imported=f"from {module} import {name}", called=called)


def keywords_text(arguments: Mapping[str, Any]) -> str:
    """Return keyword arguments as text that follows other arguments: `, foreach=True`."""
    return "".join(f", {key}={literal(value)}" for key, value in arguments.items())
