"""What is being done right now, on stderr: a line that replaces itself on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SPINNER = 3
"""Columns that are not the text's: what turns before it, a space, and the terminal's last."""


@contextmanager
def show_progress() -> Iterator[Callable[[str], None]]:
    """A function that shows what is being done, cut to one line; the line is gone when the block ends."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, markup=False)
    if not (sys.stderr.isatty() or console.is_jupyter):
        yield lambda what: None
        return
    with console.status(Text("starting")) as status:

        def tell(what: str) -> None:
            line = Text(what)
            line.truncate(console.width - SPINNER, overflow="ellipsis")
            status.update(line)

        yield tell
