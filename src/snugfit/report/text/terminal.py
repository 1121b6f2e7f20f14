"""What every terminal report shares: where it is printed, and how foreign words are made harmless.

Names of models, modules and devices come out of files that somebody else wrote. In a report they are data:
they go in as `Text`, which rich never reads as markup, without the control characters that would speak to the
terminal instead of the reader.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 120
"""Columns where no terminal says how many it has: a pipe, a file, a notebook."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def words(value: object, style: str = "") -> Text:
    """Foreign words as data: no markup, and no control characters."""
    return Text(harmless(str(value)), style=style)


def harmless(text: str) -> str:
    """Foreign words without characters that speak to a terminal, or turn the direction of reading."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def table(columns: Iterable[str], rows: Iterable[Sequence[object]], *, title: str = "") -> Table:
    """A plain table; a column whose head ends in `>` is set flush right."""
    shown = Table(
        box=SIMPLE_HEAD, title=words(title, "bold") if title else None, title_justify="left", pad_edge=False
    )
    for head in columns:
        right = head.endswith(">")
        shown.add_column(
            head.rstrip(">"), justify="right" if right else "left", no_wrap=right, overflow="fold"
        )
    for row in rows:
        shown.add_row(*(cell if isinstance(cell, Text) else words(cell) for cell in row))
    return shown


def show(content: RenderableType) -> None:
    """Prints a report on stdout."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    Console(width=width, markup=False, emoji=False, highlight=False).print(content)


def show_json(document: Mapping[str, Any]) -> None:
    """Prints one JSON document on stdout; what JSON has no word for (NaN) is an error, not a guess."""
    print(json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False))


def as_text(content: RenderableType, *, width: int = 110) -> str:
    """A report as plain text: for `print` and for files."""
    out = StringIO()
    Console(file=out, width=width, markup=False, emoji=False, highlight=False, no_color=True).print(content)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def as_html(content: RenderableType, *, width: int = 110) -> str:
    """A report as an inert HTML fragment, for a notebook's cell."""
    console = Console(
        file=StringIO(),
        width=width,
        record=True,
        markup=False,
        emoji=False,
        highlight=False,
        force_jupyter=False,
    )
    console.print(content)
    style = "font-family:Menlo,'DejaVu Sans Mono',monospace;line-height:1.2;white-space:pre"
    return console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')
