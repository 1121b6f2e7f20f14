"""A table before it has a format: a title, heads, rows of words, and a note; then Markdown or the terminal.

Foreign texts are data in each format. Markdown's own characters are escaped. A CSV cell that a spreadsheet
would run as a formula gets an apostrophe before it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO

from rich.console import Group, RenderableType

from snugfit.report.text.table import recipes_first, table
from snugfit.report.text.terminal import harmless, words

_MARKDOWN = re.compile(r"([\\`*_{}\[\]|~#])")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table of words. A head that ends in `>` marks a column of figures, in `<` one of recipes."""

    title: str
    """Description of the table's contents."""

    heads: tuple[str, ...]
    """The columns' heads, from left to right."""

    rows: tuple[tuple[str, ...], ...]
    """Cells, the same number in each row as heads."""

    note: str = ""
    """A sentence under the table."""

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
    """Return foreign words as one line of Markdown, without a character that is markup or controls a
    terminal."""
    # `&` is the first, so that no other entity is escaped twice.
    flat = harmless(" ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(r"\\\1", flat)


def csv_text(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return comma-separated values without formulas for a spreadsheet; None is an empty cell."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([inert(head) for head in heads])
    writer.writerows([[inert(cell) for cell in row] for row in rows])
    return out.getvalue()


def inert(cell: object) -> str:
    """Return a cell's text, with an apostrophe before text that a spreadsheet would take for a formula."""
    if cell is None:
        return ""
    text = str(cell)
    # A negative number begins like a formula, but is none.
    if isinstance(cell, int | float) or not text.startswith(_FORMULA):
        return text
    return f"'{text}"
