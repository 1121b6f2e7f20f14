"""Conversion of other libraries' arguments to recipes, by the counterparts that each technique declares.

No technique is named here: `Technique.counterparts` is the only source. If several techniques of a slot match
the same arguments, the one with more fixed values is returned. For example, an accumulation of 1 is the whole
batch, and not one micro-batch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from snugfit.errors import RecipeError
from snugfit.techniques import roster
from snugfit.techniques.counterpart import Counterpart, Setting
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

    faults: Mapping[str, str] = field(default_factory=dict)
    """Error sentence by argument, for values that a technique with these arguments does not allow."""


def read_slots(arguments: Mapping[str, Any]) -> tuple[SlotReading, ...]:
    """Return the technique of each slot (such as precision) that another library's arguments imply. The
    arguments must be complete, defaults included.
    """
    return tuple(_read_slot(slot, arguments) for slot in Slot)


def _read_slot(slot: Slot, arguments: Mapping[str, Any]) -> SlotReading:
    best: SlotReading | None = None
    most_literals = -1
    looked_at: dict[str, None] = {}
    faults: dict[str, str] = {}
    for kind in roster.techniques():
        for counterpart in kind.counterparts if kind.slot is slot else ():
            # Such arguments imply the technique only in a script that snugfit has written.
            if counterpart.used == "to write":
                continue
            keys = tuple(counterpart.arguments)
            looked_at |= dict.fromkeys(keys)
            literals = sum(not isinstance(value, Setting) for value in counterpart.arguments.values())
            technique = _technique_from(counterpart, kind, arguments, faults)
            # The match with more fixed values wins: an accumulation of 1 is the whole batch, not one
            # micro-batch.
            if technique is not None and literals > most_literals:
                best = SlotReading(slot=slot, technique=technique, keys=keys, note=counterpart.note)
                most_literals = literals
    return best or SlotReading(slot=slot, technique=None, keys=tuple(looked_at), faults=faults)


def _technique_from(
    counterpart: Counterpart,
    kind: type[Technique],
    arguments: Mapping[str, Any],
    faults: dict[str, str],
) -> Technique | None:
    """Return a technique of this class, built from another library's arguments. None if the values differ
    from the counterpart's, or are invalid settings. Their errors are added to `faults`.
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
    except RecipeError as error:
        keys = {value.name: key for key, value in counterpart.arguments.items() if isinstance(value, Setting)}
        # The error names its setting, as in `lora: alpha is 0; ...`.
        for word in re.findall(r"\w+", str(error)):
            if word in keys:
                faults.setdefault(keys[word], str(error))
                break
        return None
