"""A technique's settings: their declaration, check, text form and parsing.

A setting is a field of the technique's dataclass. The annotation is its type, and the metadata has its range.
Six kinds are enough for a recipe that a person types. They are whole numbers, numbers, words, several words
joined by `|`, `true` or `false`, and a choice of listed values. Each may also be `None`, written `none`. The
text of a setting is parsed to an equal value (law 4 of `dev/laws.md`). Words are limited to characters that
the notation does not use. Patterns may have any other character but a quote, and are then written in quotes:
`lora(targets='.*layers[.][0-9]+[.]mlp.*')`.
"""

from __future__ import annotations

import math
import re
import types
import typing
from dataclasses import MISSING, Field, field, fields
from functools import cache
from typing import Annotated, Any, Literal

from snugfit.errors import RecipeError, did_you_mean

# Words exclude the characters of the notation, so that each setting is read back unchanged.
_WORD = re.compile(r"[A-Za-z_][\w.*-]*", re.ASCII)
_QUOTED = re.compile(r"'[^'\s]+'")
# 18 digits fit into 64 bits.
_WHOLE = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)

Pattern = Annotated[str, "pattern"]
"""Type of a setting whose value is a word or a regular expression."""


def between(low: float, high: float, default: Any = MISSING) -> Any:
    """Declare a setting with a value from `low` to `high`, both included."""
    return field(default=default, metadata={"low": low, "high": high})


def split_outside_quotes(text: str, mark: str) -> tuple[str, ...]:
    """Split a text at separators that are not in quotes, and return the parts."""
    pieces, quoted = [""], False
    for char in text:
        quoted ^= char == "'"
        if char == mark and not quoted:
            pieces.append("")
        else:
            pieces[-1] += char
    return tuple(pieces)


@cache
def setting_types(technique: type[Any]) -> dict[str, Any]:
    """Return the annotation of each setting, in the order in which they are written by position."""
    hints = typing.get_type_hints(technique, include_extras=True)
    return {declared.name: hints[declared.name] for declared in fields(technique)}


def show_setting(value: Any) -> str:
    """Return a setting's value in a recipe's notation: a word, a number, a|b for several, `true`, `none`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return "|".join(map(_show_word, value)) if isinstance(value, tuple) else str(value)


def is_word(text: str) -> bool:
    """Return True for a text that a recipe's notation writes without quotes."""
    return bool(_WORD.fullmatch(text))


def _show_word(word: Any) -> str:
    return f"'{word}'" if isinstance(word, str) and not is_word(word) else str(word)


def read_setting(annotation: Any, text: str) -> Any:
    """Parse the text of a technique's setting of this type; raises `RecipeError` for an invalid value."""
    kinds = _alternatives(annotation)
    if text.lower() == "none" and type(None) in kinds:
        return None
    kind = kinds[0]
    if kind is bool or typing.get_origin(kind) is Literal:
        return _read_choice((True, False) if kind is bool else typing.get_args(kind), text)
    if kind is int and _WHOLE.fullmatch(text):
        return int(text)
    if kind is float and _NUMBER.fullmatch(text):
        return float(text)
    if kind is str and _WORD.fullmatch(text):
        return text
    if typing.get_origin(kind) is tuple and (values := _read_several(kind, text)):
        return values
    raise RecipeError(f"{text!r} is not {describe(annotation)}.")


def _read_several(kind: Any, text: str) -> tuple[Any, ...]:
    """Parse a setting's values joined by `|`; return an empty tuple if one has another type."""
    words = split_outside_quotes(text, "|")
    if typing.get_args(kind)[0] is int:
        return tuple(map(int, words)) if all(map(_WHOLE.fullmatch, words)) else ()
    read = tuple(word[1:-1] if _QUOTED.fullmatch(word) else word for word in words)
    unquoted = [word for word in words if word in read]
    for word in read:
        if typing.get_args(kind)[0] is Pattern and (fault := _fault_of_pattern(word)):
            raise RecipeError(f"{word!r} is not a regular expression: {fault}.")
    return read if _fits(kind, read) and all(map(is_word, unquoted)) else ()


def check_setting(declared: Field[Any], annotation: Any, value: Any) -> str | None:
    """Return the error in a setting's value as the end of a sentence, such as `must be at least 1`; None for
    a valid value.
    """
    if value is None and type(None) in _alternatives(annotation):
        return None
    if not _fits(_alternatives(annotation)[0], value):
        return f"it is {describe(annotation)}"
    low, high = declared.metadata.get("low", -math.inf), declared.metadata.get("high", math.inf)
    if isinstance(value, int | float) and not low <= value <= high:
        return f"allowed is {describe(annotation)} from {low:,} to {high:,}"
    return None


def describe(annotation: Any) -> str:
    """Return a description of a setting's type: `a whole number`, `8 or 32`."""
    kind = _alternatives(annotation)[0]
    if typing.get_origin(kind) is Literal:
        return " or ".join(show_setting(choice) for choice in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        names = {int: "a whole number, or several", Pattern: "a name or a quoted pattern, or several"}
        return f"{names.get(typing.get_args(kind)[0], 'a name, or several names')} joined by |"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a name"}[kind]


def _is_element(value: Any, kind: Any) -> bool:
    """Return True for a value that may be one of several joined by `|`, such as `q_proj` in
    `q_proj|v_proj`.
    """
    if kind is int:
        return type(value) is int
    if not isinstance(value, str):
        return False
    if kind is Pattern:
        return bool(_QUOTED.fullmatch(f"'{value}'")) and not _fault_of_pattern(value)
    return is_word(value)


def _fault_of_pattern(text: str) -> str:
    """Return the error in a quoted pattern as a regular expression; empty for a valid pattern, and for a
    name.
    """
    try:
        re.compile("" if is_word(text) else text)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return ""


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union type: (int, NoneType) for `int | None`. For another type return the type
    itself.
    """
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return typing.get_args(annotation)
    return (annotation,)


def _read_choice(choices: tuple[Any, ...], text: str) -> Any:
    by_text = {show_setting(choice): choice for choice in choices}
    if text not in by_text:
        raise RecipeError(f"{text!r} is not {' or '.join(by_text)}.{did_you_mean(text, by_text)}")
    return by_text[text]


def _fits(kind: Any, value: Any) -> bool:
    if typing.get_origin(kind) is Literal:
        # `True == 1` holds in Python, so the types are compared too.
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        element = typing.get_args(kind)[0]
        return isinstance(value, tuple) and value != () and all(_is_element(part, element) for part in value)
    if kind is str:
        return isinstance(value, str) and bool(_WORD.fullmatch(value))
    # A bool is an int in Python, but not in a recipe.
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    # NaN and infinity have no text in the notation.
    return isinstance(value, int) if kind is int else isinstance(value, int | float) and math.isfinite(value)
