"""The notation of recipes: parsing of text such as `name`, `name(4)`, `name(8, targets=q_proj|v_proj)`.

This file has the grammar; the roster resolves names. Every word records its position, so that an error can
show the whole text with the word marked:

    bf16 + adamw_8bits
           ^^^^^^^^^^^
    Unknown technique 'adamw_8bits'. Did you mean 'adamw_8bit'?

A word of another library (`gradient_checkpointing`) is replaced by snugfit's, with a message on stderr.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, NoReturn

from snugfit.errors import RecipeError, did_you_mean, nearest
from snugfit.techniques import roster
from snugfit.techniques.setting import read_setting, setting_types, split_outside_quotes
from snugfit.techniques.technique import Technique

LONGEST = 2000
"""Largest number of characters of a recipe, far more than a recipe with all slots and settings has."""

_WORD = re.compile(r"\s*(?P<name>[^\s()=,+|]+)\s*(\((?P<settings>(?:[^()']|'[^']*')*)\)\s*)?")
_QUOTED = re.compile(r"'[^']*'")


@dataclass(frozen=True, kw_only=True)
class Word:
    """One technique of a recipe's text, with its settings and its position in the text."""

    text: str
    """The text of the whole recipe that contains this word."""

    start: int
    """The index in `text` at which the word begins."""

    end: int
    """The index in `text` at which the word ends, after its parentheses."""

    name: str
    """The technique's name, before the parentheses."""

    settings: str
    """The text between the parentheses."""

    settings_start: int
    """The index in `text` at which the settings begin."""

    def refuse(self, message: str) -> NoReturn:
        """Raise `RecipeError` with the message and the recipe's text, in which this word is marked."""
        raise error_at(self.text, self.start, self.end, message)

    def technique(self) -> Technique:
        """Return the technique that this word of a recipe names, with its settings."""
        try:
            kind = roster.find(self.name)
        except RecipeError as error:
            raise error_at(self.text, self.start, self.start + len(self.name), str(error)) from None
        # An alias is replaced by the technique's own name, with a message on stderr.
        if kind.name != self.name:
            _echo_alias(self.name, kind.name)
        given = self._settings(kind)
        required = [declared.name for declared in fields(kind) if declared.default is MISSING]
        # A missing setting would raise a TypeError of the dataclass, without the place in the text.
        if missing := [name for name in required if name not in given]:
            self.refuse(f"{kind.name} needs {missing[0]}: {kind.name}({missing[0]}=...).")
        try:
            return kind(**given)
        except RecipeError as error:
            self.refuse(str(error))

    def _settings(self, technique: type[Technique]) -> dict[str, Any]:
        """Return the settings as written in the recipe, by name, with the types of the technique's fields."""
        kinds = setting_types(technique)
        given: dict[str, Any] = {}
        by_name = False
        for index, (start, piece) in enumerate(self._setting_texts()):
            try:
                if not piece:
                    raise RecipeError(
                        f"{technique.name}: a setting is missing between the commas. Add it, or remove "
                        "a comma."
                    )
                name, value = _name_and_value(technique, list(kinds), index, piece, by_name=by_name)
                if name in given:
                    raise RecipeError(f"{technique.name}: {name} is given twice. Keep one.")
                given[name] = _read(technique, name, kinds[name], value)
            except RecipeError as error:
                raise error_at(self.text, start, start + len(piece), str(error)) from None
            # As in Python, no positional setting follows a named one.
            by_name = by_name or "=" in _QUOTED.sub("", piece)
        return given

    def _setting_texts(self) -> Iterator[tuple[int, str]]:
        """Yield the texts of a technique's settings in a recipe, each with the index at which it begins
        there.
        """
        position = self.settings_start
        # An empty text between parentheses has no settings; `split` would return one.
        for piece in split_outside_quotes(self.settings, ",") if self.settings.strip() else ():
            yield position + len(piece) - len(piece.lstrip()), piece.strip()
            position += len(piece) + 1


@functools.cache
def _echo_alias(alias: str, name: str) -> None:
    """Print on stderr, once per process, the technique that replaces another library's name for it."""
    logging.getLogger("snugfit").warning("recipe: %s is called %s here", alias, name)


def error_at(text: str, start: int, end: int, message: str) -> RecipeError:
    """Return an error that shows the whole recipe text, marks it from `start` to `end`, and
    gives the reason.
    """
    # Characters such as tabs would shift the marker below the text.
    shown = "".join(char if char.isprintable() else " " for char in text)
    return RecipeError(f"{shown}\n{' ' * start}{'^' * max(end - start, 1)}\n{message}")


def parse(text: str) -> list[Word]:
    """Return the techniques that a recipe's text names, in the order written. Raises `RecipeError` for an
    invalid text.
    """
    if len(text) > LONGEST:
        raise RecipeError(
            f"A recipe may have at most {LONGEST:,} characters; this one has {len(text):,}. Shorten it."
        )
    _refuse_unbalanced(text)
    words = []
    position = 0
    while True:
        match = _WORD.match(text, position)
        if not match:
            raise error_at(
                text,
                *_around(text, position),
                "The name of a technique is missing here. Write one, such as bf16, or remove the '+'.",
            )
        # The match includes spaces at its end, which are not part of the word.
        start, end = match.start("name"), match.start() + len(match[0].rstrip())
        words.append(
            Word(
                text=text,
                start=start,
                end=end,
                name=match["name"],
                settings=match["settings"] or "",
                settings_start=max(match.start("settings"), start),
            )
        )
        position = match.end()
        if position == len(text):
            return words
        if text[position] != "+":
            raise error_at(
                text, *_around(text, position), "Techniques are joined by '+': bf16 + every_layer."
            )
        position += 1


def _refuse_unbalanced(text: str) -> None:
    """Raise `RecipeError` at the first parenthesis without a partner, or inside another pair."""
    opened: int | None = None
    unquoted = _QUOTED.sub(lambda found: " " * len(found[0]), text)
    if "'" in unquoted:
        raise error_at(
            text, unquoted.index("'"), len(text), ("This quote is never closed. Add the closing quote.")
        )
    for position, char in enumerate(unquoted):
        if char == "(":
            if opened is not None:
                raise error_at(
                    text,
                    position,
                    position + 1,
                    "Parentheses cannot contain other parentheses. Remove the inner ones.",
                )
            opened = position
        elif char == ")":
            if opened is None:
                raise error_at(text, position, position + 1, "This parenthesis was never opened. Remove it.")
            opened = None
    if opened is not None:
        raise error_at(text, opened, opened + 1, "This parenthesis is never closed. Add ')'.")


def _around(text: str, position: int) -> tuple[int, int]:
    """Return start and end of the technique's word at `position` in a recipe's text, for marking it in an
    error.
    """
    rest = re.match(r"\s*[^\s+]*", text[position:])
    length = len(rest[0]) if rest else 0
    blank = len(text[position : position + length]) - len(text[position : position + length].lstrip())
    return position + blank, position + length


def _name_and_value(
    technique: type[Technique], names: list[str], index: int, piece: str, *, by_name: bool
) -> tuple[str, str]:
    """Return the name and the text of one setting in a recipe, given by name or, at `index`, by position."""
    if not names:
        raise RecipeError(f"{technique.name} has no settings. Write the name alone.")
    parts = (piece, "", "") if piece.startswith("'") else piece.partition("=")
    name, equals, value = (part.strip() for part in parts)
    if equals:
        if name not in names:
            # A part of the given name may be a setting: `lora_rank` has `rank`.
            words = [near for word in name.split("_") for near in nearest(word, names, count=1)]
            guess = did_you_mean(name, names) or (f" Did you mean {words[0]!r}?" if words else "")
            guess = guess or f"{_initial(name, names)} Settings: {', '.join(names)}."
            raise RecipeError(f"{technique.name} has no setting {name!r}.{guess}")
        return name, value
    if by_name:
        raise RecipeError(
            f"{technique.name}: {name!r} comes after a setting given by name, so give its name too."
        )
    if index >= len(names):
        raise RecipeError(
            f"{technique.name} has no setting after {', '.join(names)}. Leave the further values out."
        )
    return names[index], name


def _initial(name: str, names: Sequence[str]) -> str:
    """Return ` Did you mean 'r'?` for `rank`: a setting of one letter that the given name begins with."""
    letter = name[:1].lower()
    return f" Did you mean {letter!r}?" if letter and letter in names else ""


def _read(technique: type[Technique], name: str, kind: Any, text: str) -> Any:
    try:
        return read_setting(kind, text)
    except RecipeError as error:
        raise RecipeError(f"{technique.name}: {name}: {error}") from None
