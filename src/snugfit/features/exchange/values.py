"""Check for values that the installed `TrainingArguments` would refuse, such as text for a number.

The annotations of the class determine the allowed values: numbers, flags, and words of an enumeration. A
field of any other type is not checked. A value `null` counts as unset and is not checked either.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from typing import Any

from snugfit.errors import did_you_mean
from snugfit.features.exchange import installed

_PLAIN = {int: "a whole number", float: "a number", bool: "true or false"}

_LEAST = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "dataloader_num_workers": 0,
}
"""Smallest valid value of an argument, by argument."""


def wrong_values(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each key of a configuration whose value transformers would refuse, with the reason."""
    for key, value in values.items():
        if isinstance(value, str | int | float) and (says := _wrong(key, value)):
            yield key, says


def _wrong(key: str, value: str | float) -> str:
    if words := _words().get(key):
        wrong = isinstance(value, str) and value not in words
        return f"{value!r} is not an allowed value.{did_you_mean(str(value), words)}" if wrong else ""
    kind = field_kinds().get(key)
    if kind is None:
        return ""
    takes = {int: int, float: int | float, bool: int | float}[kind]
    # In Python, a bool is an int, but it is not accepted as a number.
    if not isinstance(value, takes) or (kind is not bool and isinstance(value, bool)):
        return f"{value!r} is not {_PLAIN[kind]}"
    least = _LEAST.get(key)
    return f"{value} is less than {least}" if least is not None and value < least else ""


@cache
def field_kinds() -> dict[str, type]:
    """Return the `TrainingArguments` that take a number, a flag or None, with their types."""
    kinds = {key: set(_options(hint)) - {type(None)} for key, hint in installed.hints().items()}
    return {
        key: kind for key, options in kinds.items() if len(options) == 1 and (kind := options.pop()) in _PLAIN
    }


@cache
def _words() -> dict[str, frozenset[str]]:
    """Return the `TrainingArguments` that take a word of an enumeration, with the allowed words."""
    words: dict[str, frozenset[str]] = {}
    for key, hint in installed.hints().items():
        for option in _options(hint):
            if isinstance(option, type) and issubclass(option, Enum):
                words[key] = frozenset(str(member.value) for member in option)
    return words


def _options(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union type such as `int | None` in a list; for any other type, the type
    itself.
    """
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if union else (hint,)
