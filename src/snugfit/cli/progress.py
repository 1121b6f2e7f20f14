"""What is being done right now, on stderr: a line that replaces itself on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def telling() -> Iterator[Callable[[str], None]]:
    """A function that shows what has begun; the line is gone when the block ends."""
    if not sys.stderr.isatty():
        yield lambda what: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True, markup=False).status(Text("beginning")) as status:
        yield lambda what: status.update(Text(what))
