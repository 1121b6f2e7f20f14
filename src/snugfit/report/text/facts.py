"""Short lines of an answer: a label, and the text beside it."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table

from snugfit.report.text.grid import escape
from snugfit.report.text.terminal import words

LABEL = 11
"""Least width of the labels in characters, which aligns all lists of a page."""


@dataclass(frozen=True)
class Facts:
    """Labels with their texts, one below the other. Lines without a label continue the one above."""

    rows: tuple[tuple[str, str], ...]

    def __rich__(self) -> RenderableType:
        shown = Table.grid(padding=(0, 2))
        shown.add_column(no_wrap=True, min_width=LABEL)
        shown.add_column(overflow="fold")
        for label, text in self.rows:
            shown.add_row(words(label), words(text))
        return shown

    def markdown(self) -> str:
        """Return the lines as a list in GitHub's Markdown."""
        return "\n".join(f"- {escape(f'{label}: {text}' if label else text)}" for label, text in self.rows)
