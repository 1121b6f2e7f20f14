"""An HTML page, or the output of a notebook cell, with the charts of a command's result.

A page contains the library Apache ECharts (`echarts/`), so that it needs no network. The charts' data are
JSON in the page, and `templates/charts.js` draws them. Bars and timelines are plain HTML. Without JavaScript
the tables have the same numbers. A notebook cell has no script and no library: its charts are one static
image.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from snugfit.features.page.chart import Bars, Chart, PageParts, Timeline
from snugfit.features.page.colours import LINES, colours_of, ink_on
from snugfit.features.page.static import draw
from snugfit.report.text.terminal import as_text, harmless
from snugfit.units import show_seconds

if TYPE_CHECKING:
    from jinja2 import Environment

REPORT_WIDTH = 120
"""Width of the text report on a page, in characters."""

MOST_ROWS, MOST_CHARTS = 60, 4
"""Largest number of table rows, and of charts in the picture, in a notebook's cell."""


def document(parts: PageParts, *, command: str, versions: Mapping[str, str], when: datetime) -> str:
    """Return an HTML page with the charts and the report, which needs no other file and no network.

    `command` is the command line that produced the result; `versions` are those of the packages behind it.
    """
    # The page's template draws bars and timelines without the chart library.
    drawn = [chart for chart in parts.charts if not isinstance(chart.drawing, Bars | Timeline)]
    colours = colours_of(parts.meanings)
    data = {
        "charts": [{"kind": type(chart.drawing).__name__, **asdict(chart.drawing)} for chart in drawn],
        "colours": colours,
        "inks": {meaning: ink_on(colour) for meaning, colour in colours.items()},
    }
    return _fill(
        "page.html.j2",
        parts,
        data=_clean(data),
        places=[drawn.index(chart) if chart in drawn else None for chart in parts.charts],
        library=_file("echarts/echarts.min.js") if drawn else "",
        script=_file("templates/charts.js") if drawn else "",
        command=command,
        versions=versions,
        when=when.strftime("%Y-%m-%d %H:%M %Z"),
    )


def fragment(parts: PageParts) -> str:
    """Return the contents of `document` as HTML for a notebook cell, with a static picture and no script.
    Without matplotlib there is no picture.
    """
    picture = ""
    if parts.charts and find_spec("matplotlib"):
        shown = parts._replace(charts=parts.charts[:MOST_CHARTS])
        picture = b64encode(_shorten(draw(shown, "svg", with_words=False, coarse=True))).decode()
    return _fill("fragment.html.j2", parts, picture=picture, most_rows=MOST_ROWS)


def _shorten(svg: bytes) -> bytes:
    """Return an SVG drawing without metadata, and with short paths."""
    bare = re.sub(r"<metadata>.*?</metadata>", "", svg.decode("utf-8"), flags=re.DOTALL)
    return re.sub(r' d="([^"]*)"', lambda path: f' d="{_shorten_path(path[1])}"', bare).encode("utf-8")


def _shorten_path(path: str) -> str:
    """Return an SVG path with coordinates of one decimal, a tenth of a point, and without points inside of
    horizontal lines."""
    steps = [step.strip() for step in re.sub(r"(\.\d)\d+", r"\1", path).split("\n")]
    heights = [step.split()[-1] if step.startswith("L ") else "" for step in steps]
    return "".join(
        step
        for number, step in enumerate(steps)
        if not heights[number] or not heights[number - 1] == heights[number] == (*heights, "")[number + 1]
    )


def _fill(template: str, parts: PageParts, **further: Any) -> str:
    """Return an HTML template filled with a page's parts. Control characters in texts are removed."""
    return (
        _templates()
        .get_template(template)
        .render(
            parts=parts,
            report=as_text(parts.report, width=REPORT_WIDTH),
            colours=colours_of(parts.meanings),
            lines=LINES,
            kind_of=_kind_of,
            **further,
        )
    )


def _kind_of(chart: Chart) -> str:
    return type(chart.drawing).__name__


def _clean(value: Any) -> Any:
    """Convert data for JSON: named tuples become objects, and control characters are removed from texts."""
    if isinstance(value, str):
        return harmless(value)
    # A named tuple is also a tuple, so it is checked first.
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: _clean(part) for key, part in value.items()}
    return [_clean(part) for part in value] if isinstance(value, list | tuple) else value


def _file(name: str) -> str:
    return files("snugfit.features.page").joinpath(name).read_text(encoding="utf-8")


@cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("snugfit.features.page", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"harmless": harmless, "seconds": show_seconds}
    return environment
