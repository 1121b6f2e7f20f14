"""Conversion of recipes to other libraries' arguments and back, by the counterparts that each technique
declares.

No technique is named here: `Technique.counterparts` is the only source, in both directions. If several
techniques of a slot match the same arguments, the one with more fixed values is returned. For example, an
accumulation of 1 is the whole batch, and not one micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from snugfit.errors import RecipeError
from snugfit.techniques import roster
from snugfit.techniques.counterpart import Counterpart, Setting
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot, Technique


@dataclass(frozen=True, kw_only=True)
class SlotReading:
    """The technique of one slot (such as precision) that a user's arguments of another library imply."""

    slot: Slot
    """Slot (choice of a recipe, such as the optimizer) that the arguments determine."""

    technique: Technique | None
    """Technique for these arguments; None if snugfit has none."""

    keys: tuple[str, ...]
    """Keys of the other library's arguments that determine this slot."""

    note: str = ""
    """Difference between the technique and the effect of these arguments in the other library."""


def read_slots(arguments: Mapping[str, Any]) -> tuple[SlotReading, ...]:
    """Return the technique of each slot (such as precision) that another library's arguments imply. The
    arguments must be complete, defaults included.
    """
    return tuple(_read_slot(slot, arguments) for slot in Slot)


def _read_slot(slot: Slot, arguments: Mapping[str, Any]) -> SlotReading:
    best: SlotReading | None = None
    most_literals = -1
    looked_at: dict[str, None] = {}
    for kind in roster.techniques():
        for counterpart in kind.counterparts if kind.slot is slot else ():
            # Such arguments imply the technique only in a script that snugfit has written.
            if counterpart.used == "to write":
                continue
            keys = tuple(counterpart.arguments)
            looked_at |= dict.fromkeys(keys)
            literals = sum(not isinstance(value, Setting) for value in counterpart.arguments.values())
            technique = _technique_from(counterpart, kind, arguments)
            # The match with more fixed values wins: an accumulation of 1 is the whole batch, not one
            # micro-batch.
            if technique is not None and literals > most_literals:
                best = SlotReading(slot=slot, technique=technique, keys=keys, note=counterpart.note)
                most_literals = literals
    return best or SlotReading(slot=slot, technique=None, keys=tuple(looked_at))


def _technique_from(
    counterpart: Counterpart, kind: type[Technique], arguments: Mapping[str, Any]
) -> Technique | None:
    """Return a technique of this class, built from another library's arguments. None if the values differ
    from the counterpart's or are invalid settings.
    """
    settings = dict(counterpart.settings)
    for key, value in counterpart.arguments.items():
        given = arguments.get(key)
        if isinstance(value, Setting):
            settings[value.name] = given
        # `True == 1` holds in Python, but not in another library's arguments.
        elif given != value or isinstance(given, bool) != isinstance(value, bool):
            return None
    # The arguments give no value for a setting without a default.
    if any(declared.default is MISSING and declared.name not in settings for declared in fields(kind)):
        return None
    try:
        return kind(**settings)
    except RecipeError:
        return None


def write_arguments(recipe: Recipe) -> tuple[dict[str, Any], tuple[Technique, ...]]:
    """Return another library's arguments for a recipe by dotted name, and the techniques without such
    arguments."""
    arguments: dict[str, Any] = {}
    unwritten = []
    for technique in recipe:
        for counterpart in technique.counterparts:
            # A counterpart with a note behaves differently, so it is read and never written.
            is_written = not counterpart.note and counterpart.used != "to read"
            if is_written and (own := _arguments_for(counterpart, technique)) is not None:
                arguments |= own
                break
        else:
            unwritten.append(technique)
    return arguments, tuple(unwritten)


def _arguments_for(counterpart: Counterpart, technique: Technique) -> dict[str, Any] | None:
    """Return another library's arguments for this technique with its settings; None if it has no argument for
    a setting.
    """
    named = {value.name for value in _flat(counterpart.arguments) if isinstance(value, Setting)}
    for declared in fields(technique):
        value = getattr(technique, declared.name)
        implied = counterpart.settings.get(declared.name, declared.default)
        # The technique has another value of this setting than the arguments imply.
        if declared.name not in named and value != implied:
            return None
    return {key: _with_settings(value, technique) for key, value in counterpart.arguments.items()}


def _flat(arguments: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the values in nested mappings, such as arguments in named groups."""
    for value in arguments.values():
        yield from _flat(value) if isinstance(value, Mapping) else (value,)


def _with_settings(value: Any, technique: Technique) -> Any:
    """Return a value in which each `Setting` is replaced by the value of the technique's setting of that
    name.
    """
    if isinstance(value, Mapping):
        return {key: _with_settings(part, technique) for key, part in value.items()}
    return getattr(technique, value.name) if isinstance(value, Setting) else value
