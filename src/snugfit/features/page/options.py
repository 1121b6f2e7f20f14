"""The options `--html`, `--open` and `--plot`, and the writing of the files that they name."""

from __future__ import annotations

import inspect
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from snugfit.cli import arguments as given
from snugfit.errors import UsageError, require_packages

COMMANDS = ("predict", "plan", "measure", "gpus", "guide")
"""Commands whose results have charts."""

TEXT_BROWSERS = ("www-browser", "links", "elinks", "lynx", "w3m")

Html = Annotated[
    Path | None,
    given.file_option(
        "--html",
        "Write the answer with pictures into this .html file.",
        (".html", ".htm"),
        "a page is a .html file",
    ),
]
Plot = Annotated[
    Path | None, given.file_option("--plot", "Draw the same into this .png or .svg file.", *given.PLOT_FILE)
]
Open = Annotated[
    bool,
    typer.Option("--open", help="Open the page in the browser; without --html it is a temporary file."),
]


def _pictures(*, html: Html = None, open: Open = False, plot: Plot = None) -> None:
    """Declare, as parameters, the options `--html`, `--open` and `--plot` of commands whose results have
    charts.
    """


_PICTURES = inspect.signature(_pictures, eval_str=True).parameters


def options(command: str) -> list[inspect.Parameter]:
    """Return the options of this feature for a command; empty if its result has no charts."""
    return list(_PICTURES.values()) if command in COMMANDS else []


def check_options(command: str, flags: Mapping[str, Any], gpus: int) -> None:
    """Raise `UsageError` for options of this feature that a plan for several GPUs does not support, and for a
    plot without its package.
    """
    if flags.get("plot") is not None:
        require_packages("--plot", "matplotlib")
    several = command in ("plan", "gpus") and (flags.get("gpus") is not None or gpus != 1)
    if several and (alone := [f"--{name}" for name in _PICTURES if flags.get(name)]):
        raise UsageError(f"`{command}` with --gpus does not take {', '.join(alone)}. Leave it out.")


def write_pictures(flags: Mapping[str, Any], answer: object) -> None:
    """Write a result's page and plot to the requested files, and open the page for `--open`."""
    html, opens, plot = (flags.get(name) for name in _PICTURES)
    if not (html or plot or opens):
        return
    from snugfit.features.page.pictures import draw_page, parts_of
    from snugfit.features.page.static import draw
    from snugfit.frontends.one_of_several import COMMAND_LINE
    from snugfit.report.text.files import write_atomically

    parts = parts_of(answer)
    assert parts is not None, "a command of COMMANDS has an answer with charts"
    if html is None and opens:
        html = Path(tempfile.mkdtemp(prefix="snugfit-"), "page.html")
    if html is not None:
        words = COMMAND_LINE.get()
        used = getattr(answer, "versions", {})
        page = draw_page(parts, used, command=shlex.join(["snugfit", *words]) if words else "")
        given.say_written(write_atomically(html, page))
    if plot is not None:
        given.say_written(write_atomically(plot, draw(parts, plot.suffix[1:])))
    if html is not None and opens:
        _open(html)


def _open(page: Path) -> None:
    """Open a page in the browser, or print that there is none. A text-mode browser is not used, because it
    would occupy the terminal.
    """
    import webbrowser

    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        browser = None
    is_text = Path(getattr(browser, "name", None) or "").name in TEXT_BROWSERS
    if browser is None or is_text or not browser.open(page.resolve().as_uri()):
        typer.echo(f"--open: no browser can be opened here. Open this file in one: {page}", err=True)
