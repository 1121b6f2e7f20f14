"""Values as Python text, with double quotes as most people's formatters have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def literal(value: Any) -> str:
    """The expression whose value is `value`: text, numbers, truth values, lists and mappings of these."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(key)}: {literal(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    written = repr(value)
    if isinstance(value, str) and written.startswith("'") and '"' not in value:
        return f'"{written[1:-1]}"'
    return written
