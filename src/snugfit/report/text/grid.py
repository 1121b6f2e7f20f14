"""A table of a report, independent of the output format: a title, column titles, rows of text, and a note. It
becomes Markdown or terminal output.

Foreign texts are data in each format: Markdown's own characters are escaped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich.console import Group, RenderableType

from snugfit.report.text.table import recipes_first, table
from snugfit.report.text.terminal import harmless, words

_MARKDOWN = re.compile(r"([\\`*_{}\[\]|~#])")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table of text. A column title that ends in `>` marks a column of numbers, in `<` one of recipes."""

    title: str
    """Description of the table's contents."""

    heads: tuple[str, ...]
    """The headings of the columns, from left to right."""

    rows: tuple[tuple[str, ...], ...]
    """Rows of cells, each with one cell per column."""

    note: str = ""
    """A sentence below the table; empty for none."""

    def __rich__(self) -> RenderableType:
        shown = table(self.heads, self.rows, title=self.title)
        return Group(shown, words(self.note), words("")) if self.note else shown

    def markdown(self) -> str:
        """Return the table in GitHub's Markdown."""
        heads, rows = recipes_first(self.heads, self.rows)
        rule = ["---:" if head.endswith(">") else "---" for head in heads]
        cells = [[head.rstrip("<>") for head in heads], rule]
        cells += [[escape(str(cell)) for cell in row] for row in rows]
        body = "\n".join(f"| {' | '.join(row)} |" for row in cells)
        note = f"\n{escape(self.note)}\n" if self.note else ""
        return f"### {escape(self.title)}\n\n{body}\n{note}"


def escape(text: str) -> str:
    """Return text from outside as one line of Markdown, without characters that are markup or control a
    terminal.
    """
    # `&` is replaced first, so that the entities of other characters are not escaped twice.
    flat = harmless(" ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(r"\\\1", flat)
