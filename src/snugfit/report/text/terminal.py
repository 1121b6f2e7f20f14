"""Output to the terminal, without control characters in text from outside.

Names of models, modules and devices come from foreign files. In a report they are data. They are `Text`,
which rich never parses as markup, without the control characters that a terminal would execute.
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

from snugfit.documents import stdout_of_documents
from snugfit.errors import CONTROL

PIPE_WIDTH = 120
"""Line width in characters of output that is no terminal: a pipe, a file, a notebook."""


def words(value: object, style: str = "") -> Text:
    """Return text from foreign files as rich's `Text`: no markup, and no control characters."""
    return Text(harmless(str(value)), style=style)


def harmless(text: str) -> str:
    """Return text without characters that control a terminal or reverse the reading direction."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def show(content: RenderableType, *, stderr: bool = False) -> None:
    """Print a report on stdout or stderr. Its width is COLUMNS, even in a pipe, or that of its terminal."""
    width = _columns(sys.stderr if stderr else sys.stdout)
    console = Console(width=width, stderr=stderr, markup=False, emoji=False, highlight=False)
    # rich would cut lines that are wider than the console.
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
    """Print one JSON document on stdout. A value that JSON cannot represent (NaN) raises `ValueError`."""
    stdout = stdout_of_documents()
    # In narrow encodings, characters become ASCII escapes, because a replaced character would change a value.
    narrow = not (stdout.encoding or "utf-8").lower().startswith("utf")
    print(json.dumps(document, indent=2, allow_nan=False, ensure_ascii=narrow), file=stdout)


def as_text(content: RenderableType, *, width: int = 110) -> str:
    """Return a report as plain text, for `print` and for files."""
    out = StringIO()
    Console(
        file=out,
        width=width,
        markup=False,
        emoji=False,
        highlight=False,
        no_color=True,
        force_jupyter=False,  # in a notebook, rich would ignore `file`
        force_terminal=False,  # With FORCE_COLOR (usual in notebooks), rich would write escape sequences.
    ).print(content, crop=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def as_html(content: RenderableType) -> str:
    """Return a report as an HTML fragment without scripts, for a notebook's cell."""
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
