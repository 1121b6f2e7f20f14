"""What is being done right now, on stderr: a line that replaces itself on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def show_progress() -> Iterator[Callable[[str], None]]:
    """A function that shows what is being done; the line is gone when the block ends."""
    if not sys.stderr.isatty():
        yield lambda what: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True, markup=False).status(Text("starting")) as status:
        yield lambda what: status.update(Text(what))
