"""Display of progress: one line that replaces itself on a terminal or in a notebook, and a few lines on
stderr elsewhere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from snugfit.errors import escape_controls

SPINNER = 3
"""Number of terminal columns that the progress text cannot use: the spinner, a space, and the last column."""

QUIET = 30.0
"""Seconds until the second progress line where stderr is not a terminal. The time between lines then doubles,
so that hours of work give a dozen lines."""


@contextmanager
def show_progress(first: str = "") -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current work, cut to one line, until the block ends.

    If stderr is no terminal, it writes a line after `QUIET` seconds, and another after twice as many each
    time. `first` is shown at once, as one line if stderr is no terminal.
    """
    interactive = sys.stderr.isatty()
    if first and not interactive:
        print(f"snugfit: {escape_controls(first)} ...", file=sys.stderr, flush=True)
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, markup=False)
    if console.is_jupyter:
        # rich would need ipywidgets in a notebook, and leave its lines in the cell.
        with _line_of_a_cell(first or "starting") as tell:
            yield tell
        return
    if not interactive:
        yield _seldom()
        return
    with console.status(Text(first or "starting")) as status:

        def tell(message: str) -> None:
            line = Text(message)
            line.truncate(console.width - SPINNER, overflow="ellipsis")
            status.update(line)

        yield tell


@contextmanager
def _line_of_a_cell(first: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that replaces a line in the output of a notebook's cell, and clears it at the end."""
    from IPython.display import display

    line = display({"text/plain": first}, raw=True, display_id=True)
    try:
        yield lambda message: line.update({"text/plain": message}, raw=True)
    finally:
        line.update({"text/plain": ""}, raw=True)


def _seldom() -> Callable[[str], None]:
    """Return a function that prints a progress line on stderr after `QUIET` seconds, and further ones after
    twice the time each.
    """
    began, due = time.monotonic(), QUIET

    def tell(message: str) -> None:
        nonlocal due
        passed = time.monotonic() - began
        if passed >= due:
            print(f"After {passed:.0f} s: {message}", file=sys.stderr, flush=True)
            while due <= passed:
                due *= 2

    return tell
