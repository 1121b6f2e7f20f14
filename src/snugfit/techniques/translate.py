"""Recipes into other libraries' arguments and back, by what each technique says of itself.

No technique is known here by name: `Technique.counterparts` is the only source, in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot, Technique


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a slot's arguments mean."""

    slot: Slot
    """The recipe's place."""

    technique: Technique | None
    """What goes there; None when no technique is asked for in this way."""

    keys: tuple[str, ...]
    """The arguments that decide this slot, and were looked at."""

    note: str = ""
    """What is not quite the same."""


def read_slots(arguments: Mapping[str, Any]) -> tuple[Found, ...]:
    """Slot by slot, the technique that these arguments ask for. They must be complete, defaults and all."""
    return tuple(_read_slot(slot, arguments) for slot in Slot)


def _read_slot(slot: Slot, arguments: Mapping[str, Any]) -> Found:
    best: tuple[int, Technique, tuple[str, ...], str] | None = None
    looked_at: dict[str, None] = {}
    for kind in roster.techniques():
        for counterpart in kind.counterparts if kind.slot is slot else ():
            keys = tuple(counterpart.arguments)
            looked_at |= dict.fromkeys(keys)
            technique = counterpart.read(kind, arguments)
            if technique is not None and (best is None or counterpart.literals > best[0]):
                best = (counterpart.literals, technique, keys, counterpart.note)
    if best is None:
        return Found(slot=slot, technique=None, keys=tuple(looked_at))
    return Found(slot=slot, technique=best[1], keys=best[2], note=best[3])


def write_arguments(recipe: Recipe) -> tuple[dict[str, Any], tuple[Technique, ...]]:
    """The recipe as dotted arguments, and the techniques that these cannot say."""
    arguments: dict[str, Any] = {}
    unsaid = []
    for technique in recipe:
        for counterpart in technique.counterparts:
            if not counterpart.note and (written := counterpart.written(technique)) is not None:
                arguments |= written
                break
        else:
            unsaid.append(technique)
    return arguments, tuple(unsaid)
