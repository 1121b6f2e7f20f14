"""What every terminal report shares: where it is printed, and how foreign words are made harmless.

Names of models, modules and devices come out of files that somebody else wrote. In a report they are data:
they go in as `Text`, which rich never reads as markup, without the control characters that would speak to the
terminal instead of the reader.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from textwrap import wrap
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from snugfit.errors import CONTROL

PIPE_WIDTH = 120
"""Columns where no terminal says how many it has: a pipe, a file, a notebook."""

NARROWEST_HEAD = 8
"""Columns that the head of a column of numbers may take in any case."""

LONGEST_WORD = 12
"""Longer words are broken where a column of texts has no more room."""


def words(value: object, style: str = "") -> Text:
    """Foreign words as data: no markup, and no control characters."""
    return Text(harmless(str(value)), style=style)


def harmless(text: str) -> str:
    """Foreign words without characters that speak to a terminal, or turn the direction of reading."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


class PlainTable(Table):
    """A table that sets its columns closer where the terminal is narrower than `needed` columns. Where that
    does not suffice it runs over the edge: a number that is cut off is another number."""

    needed = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.padding = (0, 1) if options.max_width >= self.needed else (0, 0)
        least = self.needed - 2 * len(self.columns) + 1  # its left edge
        return super().__rich_console__(console, options.update(max_width=max(options.max_width, least)))


def table(columns: Iterable[str], rows: Iterable[Sequence[object]], *, title: str = "") -> PlainTable:
    """A plain table; a column whose head ends in `>` holds numbers: it is set flush right, never broken, and
    its head is broken where it is wider than they are. Texts are broken last within their words."""
    shown = PlainTable(
        box=SIMPLE_HEAD, title=words(title, "bold") if title else None, title_justify="left", pad_edge=False
    )
    cells = [[cell if isinstance(cell, Text) else words(cell) for cell in row] for row in rows]
    for number, head in enumerate(columns):
        texts = [row[number] for row in cells]
        if head.endswith(">"):
            longest = max((text.cell_len for text in texts), default=0)
            lines = wrap(head.rstrip(">"), max(longest, NARROWEST_HEAD), break_long_words=False)
            shown.add_column("\n".join(lines), justify="right", no_wrap=True)
            shown.needed += max([longest, *map(len, lines)]) + 3
        else:
            longest = max((len(word) for text in [head, *texts] for word in str(text).split()), default=0)
            narrowest = min(longest, LONGEST_WORD)
            shown.add_column(head, overflow="fold", min_width=narrowest)
            shown.needed += narrowest + 3
    for row in cells:
        shown.add_row(*row)
    return shown


def show(content: RenderableType) -> None:
    """Prints a report on stdout."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    Console(width=width, markup=False, emoji=False, highlight=False).print(content, crop=False)


def show_json(document: Mapping[str, Any]) -> None:
    """Prints one JSON document on stdout; what JSON has no word for (NaN) is an error, not a guess."""
    print(json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False))


def as_text(content: RenderableType, *, width: int = 110) -> str:
    """A report as plain text: for `print` and for files."""
    out = StringIO()
    Console(file=out, width=width, markup=False, emoji=False, highlight=False, no_color=True).print(
        content, crop=False
    )
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def as_html(content: RenderableType) -> str:
    """A report as an inert HTML fragment, for a notebook's cell."""
    console = Console(
        file=StringIO(),
        width=110,
        record=True,
        markup=False,
        emoji=False,
        highlight=False,
        force_jupyter=False,
    )
    console.print(content, crop=False)
    style = "font-family:Menlo,'DejaVu Sans Mono',monospace;line-height:1.2;white-space:pre"
    return console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')
