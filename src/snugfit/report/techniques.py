"""The techniques in a terminal, slot by slot, as the vocabulary of recipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType

from snugfit.report.text.table import table
from snugfit.report.text.terminal import words
from snugfit.techniques.roster import setting_lines
from snugfit.techniques.technique import Technique


def render(roster: Sequence[type[Technique]]) -> RenderableType:
    """Return one line for each technique. The plain technique of each slot, the default of a recipe, is
    marked."""
    rows: list[tuple[str, ...]] = []
    slot = None
    for technique in roster:
        name = f"{technique.name}{_settings(technique)}{' *' if technique.plain else ''}"
        first = "" if technique.slot is slot else str(technique.slot)
        lacking = technique.missing_package() or ""
        rows.append((first, name, str(technique.fidelity), technique.summary(), lacking))
        slot = technique.slot
    legend = (
        "* the default of its slot. Fidelity to the plain recipe: same (the same sums), rounds (the same "
        "formula, other rounding), learns (another algorithm that also learns)."
    )
    heads: tuple[str, ...] = ("Slot", "Technique", "Fidelity", "What it does", "Missing here")
    if not any(row[-1] for row in rows):  # a narrow terminal has no room for an empty column
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    return Group(table(heads, rows), words(legend))


def _settings(technique: type[Technique]) -> str:
    shown = [
        f"{line.name}={line.default}" if line.default else line.name for line in setting_lines(technique)
    ]
    return f"({', '.join(shown)})" if shown else ""


def document(roster: Sequence[type[Technique]]) -> dict[str, Any]:
    """Return the techniques as JSON, with every setting and source."""
    return {
        "schema": 1,
        "what": "techniques",
        "techniques": [
            {
                "name": technique.name,
                "slot": str(technique.slot),
                "plain": technique.plain,
                "fidelity": str(technique.fidelity),
                "summary": technique.summary(),
                "source": technique.source,
                "needs": list(technique.needs),
                "missing": technique.missing_package(),
                "settings": [
                    {"name": line.name, "kind": line.kind, "default": line.default, "sentence": line.sentence}
                    for line in setting_lines(technique)
                ],
            }
            for technique in roster
        ],
    }
