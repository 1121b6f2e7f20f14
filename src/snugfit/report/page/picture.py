"""A picture with its legend and its table, and the page or the notebook's cell around pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from snugfit.report.text.terminal import harmless
from snugfit.versions import __version__

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


class LegendEntry(NamedTuple):
    """The meaning of one colour."""

    class_: str
    """The class of the shapes in that colour; `line ...` for a line."""
    words: str


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture, and the same figures as a table."""

    title: str
    """Description of the picture in a few words."""

    svg: Markup
    """The drawing; it needs no other file."""

    heads: tuple[str, ...]
    """The table's columns; a head that ends in `>` marks numbers."""

    rows: Sequence[Sequence[str]]
    """Cells, the same number in each row as heads."""

    legend: tuple[LegendEntry, ...] = ()
    """The colours, in the order of the drawing."""

    note: str = ""
    """A sentence under the drawing."""

    numbered: bool = False
    """True if the drawing has numbers that only the table explains."""


def document(
    title: str, lines: Iterable[str], pictures: Sequence[Picture], notes: Iterable[str] = (), *, report: str
) -> str:
    """Return a whole HTML page that needs no other file and no network. It has sentences, pictures, notes
    below them, and the result as plain text in `report`."""
    return _fill("page.html.j2", title, lines, pictures, notes, report, open_first=False)


def fragment(
    title: str, lines: Iterable[str], pictures: Sequence[Picture], notes: Iterable[str] = (), *, report: str
) -> str:
    """Return the contents of `document` for a notebook's cell: without a script, and the first picture's
    table open."""
    return _fill("fragment.html.j2", title, lines, pictures, notes, report, open_first=True)


def _fill(
    template: str,
    title: str,
    lines: Iterable[str],
    pictures: Sequence[Picture],
    notes: Iterable[str],
    report: str,
    *,
    open_first: bool,
) -> str:
    return (
        _templates()
        .get_template(template)
        .render(
            title=harmless(title),
            lines=list(lines),
            pictures=pictures,
            notes=list(notes),
            report=report,
            version=__version__,
            open_first=open_first,
        )
    )


def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("snugfit.report.page", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["harmless"] = harmless
    return environment
