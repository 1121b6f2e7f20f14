"""The recipe's notation, from text to words: `name`, `name(4)`, `name(8, targets=q_proj|v_proj)`.

This file knows the grammar; what a name means it asks the roster. Every word remembers where it stood, so
that an error can show the whole text with the word marked:

    bf16 + adamw_8bits
           ^^^^^^^^^^^
    Unknown technique 'adamw_8bits'. Did you mean 'adamw_8bit'?
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any, NoReturn

from snugfit.errors import RecipeError, did_you_mean
from snugfit.techniques import roster
from snugfit.techniques.setting import read_setting, setting_types
from snugfit.techniques.technique import Technique

LONGEST = 2000
"""Characters of a recipe: far more than every slot with every setting takes."""

_WORD = re.compile(r"\s*(?P<name>[^\s()=,+|]+)\s*(\((?P<settings>[^()]*)\)\s*)?")


@dataclass(frozen=True, kw_only=True)
class Word:
    """One technique as it was written, and where."""

    text: str
    """The whole recipe."""

    start: int
    """Where the word begins in it."""

    end: int
    """Where it ends, its parentheses included."""

    name: str
    """The technique's name."""

    settings: str
    """What stood in the parentheses."""

    settings_start: int
    """Where that began."""

    def refuse(self, message: str) -> NoReturn:
        """Raises `RecipeError` with the text, this word marked."""
        raise marked(self.text, self.start, self.end, message)

    def technique(self) -> Technique:
        """The technique that the word means, with its settings."""
        try:
            found = roster.find(self.name)
        except RecipeError as error:
            raise marked(self.text, self.start, self.start + len(self.name), str(error)) from None
        given = self._given(found)
        required = [declared.name for declared in fields(found) if declared.default is MISSING]
        if lacking := [name for name in required if name not in given]:
            self.refuse(f"{found.name} needs {lacking[0]}: {found.name}({lacking[0]}=...).")
        try:
            return found(**given)
        except RecipeError as error:
            self.refuse(str(error))

    def _given(self, technique: type[Technique]) -> dict[str, Any]:
        """The settings as written, by name, typed by the technique's fields."""
        kinds = setting_types(technique)
        given: dict[str, Any] = {}
        by_name = False
        for index, (start, piece) in enumerate(self._pieces()):
            try:
                if not piece:
                    raise RecipeError(f"{technique.name}: a setting belongs between the commas.")
                name, value = _name_and_value(technique, list(kinds), index, piece, by_name=by_name)
                if name in given:
                    raise RecipeError(f"{technique.name}: {name} is given twice.")
                given[name] = _read(technique, name, kinds[name], value)
            except RecipeError as error:
                raise marked(self.text, start, start + len(piece), str(error)) from None
            by_name = by_name or "=" in piece
        return given

    def _pieces(self) -> Iterator[tuple[int, str]]:
        """What stands between the commas, stripped, each with its place in the recipe."""
        position = self.settings_start
        for piece in self.settings.split(",") if self.settings.strip() else []:
            yield position + len(piece) - len(piece.lstrip()), piece.strip()
            position += len(piece) + 1


def marked(text: str, start: int, end: int, message: str) -> RecipeError:
    """The error that shows the whole text, what failed in it, and why."""
    shown = "".join(char if char.isprintable() else " " for char in text)
    return RecipeError(f"{shown}\n{' ' * start}{'^' * max(end - start, 1)}\n{message}")


def parse(text: str) -> list[Word]:
    """The words of a recipe, in the order written. Raises `RecipeError` where the text is no recipe."""
    if len(text) > LONGEST:
        raise RecipeError(f"A recipe has at most {LONGEST:,} characters; this one has {len(text):,}.")
    _balanced(text)
    words = []
    position = 0
    while True:
        found = _WORD.match(text, position)
        if not found:
            raise marked(text, *_around(text, position), "A technique's name belongs here.")
        start, end = found.start("name"), found.start() + len(found[0].rstrip())
        words.append(
            Word(
                text=text,
                start=start,
                end=end,
                name=found["name"],
                settings=found["settings"] or "",
                settings_start=max(found.start("settings"), start),
            )
        )
        position = found.end()
        if position == len(text):
            return words
        if text[position] != "+":
            raise marked(text, *_around(text, position), "Techniques are joined by '+': bf16 + every_layer.")
        position += 1


def _balanced(text: str) -> None:
    """Raises `RecipeError` at the first parenthesis without a partner, or inside another pair."""
    opened: int | None = None
    for position, char in enumerate(text):
        if char == "(":
            if opened is not None:
                raise marked(text, position, position + 1, "Parentheses hold settings and no parentheses.")
            opened = position
        elif char == ")":
            if opened is None:
                raise marked(text, position, position + 1, "This parenthesis was never opened.")
            opened = None
    if opened is not None:
        raise marked(text, opened, opened + 1, "This parenthesis is never closed.")


def _around(text: str, position: int) -> tuple[int, int]:
    """From `position` to the end of what stands there, for the marker."""
    rest = re.match(r"\s*[^\s+]*", text[position:])
    length = len(rest[0]) if rest else 0
    blank = len(text[position : position + length]) - len(text[position : position + length].lstrip())
    return position + blank, position + length


def _name_and_value(
    technique: type[Technique], names: list[str], index: int, piece: str, *, by_name: bool
) -> tuple[str, str]:
    """The name and the text of one setting, given by name or, at `index`, by position."""
    if not names:
        raise RecipeError(f"{technique.name} has no settings.")
    name, equals, value = (part.strip() for part in piece.partition("="))
    if equals:
        if name not in names:
            guess = did_you_mean(name, names) or f" Settings: {', '.join(names)}."
            raise RecipeError(f"{technique.name} has no setting {name!r}.{guess}")
        return name, value
    if by_name:
        raise RecipeError(f"{technique.name}: {name!r} follows a setting given by name, so name it too.")
    if index >= len(names):
        raise RecipeError(f"{technique.name} has no setting after {', '.join(names)}.")
    return names[index], name


def _read(technique: type[Technique], name: str, kind: Any, text: str) -> Any:
    try:
        return read_setting(kind, text)
    except RecipeError as error:
        raise RecipeError(f"{technique.name}: {name}: {error}") from None
