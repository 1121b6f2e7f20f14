"""What every terminal report shares: where it is printed, and how foreign words are made harmless.

Names of models, modules and devices come out of files that somebody else wrote. In a report they are data:
they go in as `Text`, which rich never reads as markup, without the control characters that would speak to the
terminal instead of the reader.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from io import StringIO
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from snugfit.errors import CONTROL

PIPE_WIDTH = 120
"""Columns where no terminal says how many it has: a pipe, a file, a notebook."""


def words(value: object, style: str = "") -> Text:
    """Foreign words as data: no markup, and no control characters."""
    return Text(harmless(str(value)), style=style)


def harmless(text: str) -> str:
    """Foreign words without characters that speak to a terminal, or turn the direction of reading."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def show(content: RenderableType, *, stderr: bool = False) -> None:
    """Prints a report on stdout or stderr, as wide as COLUMNS says, even in a pipe, or its terminal is."""
    width = _columns(sys.stderr if stderr else sys.stdout)
    console = Console(width=width, stderr=stderr, markup=False, emoji=False, highlight=False)
    console.print(content, crop=False)


def _columns(stream: TextIO) -> int:
    wished = os.environ.get("COLUMNS", "")
    if wished.isdecimal() and int(wished):
        return int(wished)
    try:
        return os.get_terminal_size(stream.fileno()).columns or PIPE_WIDTH
    except OSError:
        return PIPE_WIDTH


def show_json(document: Mapping[str, Any]) -> None:
    """Prints one JSON document on stdout; what JSON has no word for (NaN) is an error, not a guess."""
    print(json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False))


def as_text(content: RenderableType, *, width: int = 110) -> str:
    """A report as plain text: for `print` and for files."""
    out = StringIO()
    Console(
        file=out,
        width=width,
        markup=False,
        emoji=False,
        highlight=False,
        no_color=True,
        force_jupyter=False,  # in a notebook rich shows it there, whatever `file` is
        force_terminal=False,  # and writes escapes where FORCE_COLOR is set, as notebooks do
    ).print(content, crop=False)
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
