"""Labelled lines of a report: a label, and the text next to it."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from snugfit.report.text.grid import escape
from snugfit.report.text.terminal import harmless, words

LABEL = 11
"""Width of the labels in characters, equal in all lists of a report."""


@dataclass(frozen=True)
class Facts:
    """A list of labelled lines. A line without a label continues the line above it."""

    rows: tuple[tuple[str, str], ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for label, text in self.rows:
            lines = words(text).wrap(console, options.max_width - LABEL - 2, overflow="fold")
            for number, line in enumerate(lines):
                yield Text(f"{'' if number else harmless(label):{LABEL}}  ") + line

    def markdown(self) -> str:
        """Return the lines as a list in GitHub's Markdown."""
        return "\n".join(f"- {escape(f'{label}: {text}' if label else text)}" for label, text in self.rows)
