"""The techniques in a terminal, slot by slot (a choice of the recipe, such as the optimizer), as the words of
recipes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from rich.console import Group, RenderableType

from snugfit.documents import JsonDocument
from snugfit.report.text.table import table
from snugfit.report.text.terminal import words
from snugfit.techniques.roster import SettingLine, setting_lines
from snugfit.techniques.technique import Technique


def render(roster: Sequence[type[Technique]]) -> RenderableType:
    """Return a list of techniques with one line for each. The default technique of each slot of a recipe is
    marked.
    """
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
    if not any(row[-1] for row in rows):  # a narrow terminal has no space for it
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    return Group(table(heads, rows), words(legend))


def _settings(technique: type[Technique]) -> str:
    shown = [
        f"{line.name}={line.default}" if line.default else line.name for line in setting_lines(technique)
    ]
    return f"({', '.join(shown)})" if shown else ""


@dataclass(frozen=True, kw_only=True)
class DescribedTechnique:
    """A technique with its settings, as in JSON output."""

    name: str
    """Name of the technique in recipes, such as `bf16`."""
    slot: str
    """Slot: a group of alternative techniques, such as optimizers. A recipe has one technique of each slot.
    """
    plain: bool
    """True for the default technique of its slot."""
    fidelity: str
    """Numerical difference from the default technique: `same` sums, other rounding (`rounds`), or another
    algorithm (`learns`)."""
    summary: str
    """Effect of the technique in one sentence."""
    source: str
    """Address of the documentation or of the paper."""
    needs: tuple[str, ...]
    """Names of the packages that the technique needs."""
    missing: str | None
    """Name of a needed package that is not installed; null if all are."""
    settings: tuple[SettingLine, ...]
    """Settings of the technique, in the order of positional arguments."""


@dataclass(frozen=True, kw_only=True)
class TechniqueList(JsonDocument):
    """The techniques of the recipe notation."""

    what: ClassVar = "techniques"

    techniques: tuple[DescribedTechnique, ...]
    """The listed techniques, sorted by slot."""

    @classmethod
    def of(cls, roster: Sequence[type[Technique]]) -> Self:
        """Return the list of these techniques."""
        return cls(
            techniques=tuple(
                DescribedTechnique(
                    name=technique.name,
                    slot=str(technique.slot),
                    plain=technique.plain,
                    fidelity=str(technique.fidelity),
                    summary=technique.summary(),
                    source=technique.source,
                    needs=tuple(technique.needs),
                    missing=technique.missing_package(),
                    settings=setting_lines(technique),
                )
                for technique in roster
            )
        )
