"""The pictures of a page as a `png` or `svg` file of matplotlib, each with its title, legend and note.

A picture is a flat list of shapes with classes, the same as in the page. Here they are drawn in the page's
light colours, one unit for one unit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from html.parser import HTMLParser
from importlib.resources import files
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.report.page.picture import Picture
from snugfit.report.page.svg import WIDTH
from snugfit.report.text.figure import FONT, drawing
from snugfit.report.text.terminal import harmless

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UNIT = 1 / 96
"""Inches of a unit: those of a pixel in a browser."""

MARGIN, LINE = 20.0, 18.0
"""Margin around the plot, and distance between lines of words, in units."""

SIZE, LARGE = 13.0, 15.0
"""Font sizes of words and of titles, in units."""

POINTS = 72
"""Points of an inch, matplotlib's unit of font sizes."""

_LINES: dict[str, dict[str, Any]] = {
    "rule": {"color": "rule", "linewidth": 0.75},
    "bracket": {"color": "faint", "linewidth": 0.75},
    "bound": {"color": "mark", "linewidth": 1.5, "linestyle": (0, (4, 2.5))},
    "reserved": {"color": "ink", "linewidth": 1.1},
    "best": {"color": "mark", "linewidth": 1.9},
}
"""The page's style of each class of lines."""

_INKS = {"faint": "faint", "on0": "paper"}


def plot(
    title: str, lines: Iterable[str], pictures: Sequence[Picture], notes: Iterable[str], form: str
) -> bytes:
    """Return the bytes of a file with the answer in sentences, its pictures one below the other, and
    notes."""
    with drawing(form, width=(WIDTH + 2 * MARGIN) * UNIT, height=1.0) as drawn:
        drawn.figure.set_layout_engine("none")
        axes = drawn.figure.add_axes((0.0, 0.0, 1.0, 1.0))
        canvas = _Canvas(axes)
        canvas.write(title, LARGE)
        for number, line in enumerate(lines):
            canvas.write(line, bold=number == 0)
        for picture in pictures:
            canvas.add(picture)
        canvas.y += LINE
        for note in notes:
            canvas.write(note, SIZE - 1, ink="faint")
        height = canvas.y + MARGIN
        drawn.figure.set_size_inches((WIDTH + 2 * MARGIN) * UNIT, height * UNIT)
        axes.set(xlim=(-MARGIN, WIDTH + MARGIN), ylim=(height, 0.0))
        axes.axis("off")
    return drawn.content


@cache
def _colours() -> dict[str, str]:
    """Return the page's light colours: `c0` to `c10`, and `ink`, `faint`, `rule`, `mark`, `paper`."""
    style = files("snugfit.report.page").joinpath("templates/style.css").read_text(encoding="utf-8")
    named = re.findall(r"--(\w+): (#\w+);", style.partition("}")[0])
    return dict(named) | dict(re.findall(r"\.(c\d+) \{ fill: (#\w+);", style))


@cache
def _width(words: str, size: float, *, bold: bool = False) -> float:
    """Return the width of the words in units."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=FONT, size=size, weight="bold" if bold else "normal")
    width, _, _ = text_to_path.get_text_width_height_descent(words, font, ismath=False)
    return float(width)


class _Shape(NamedTuple):
    """One element of a drawing."""

    name: str
    attributes: dict[str, str]
    words: str
    """Contents of a `text` or a `title`."""

    def number(self, name: str) -> float:
        """Return one of its attributes as a number."""
        return float(self.attributes[name])

    @property
    def corners(self) -> list[tuple[float, float]]:
        """The corners of a polyline or an area."""
        pairs = (pair.split(",") for pair in self.attributes["points"].split())
        return [(float(x), float(y)) for x, y in pairs]


class _Shapes(HTMLParser):
    """The elements of a drawing in their order."""

    def __init__(self, drawing: str) -> None:
        super().__init__(convert_charrefs=True)
        self.shapes: list[_Shape] = []
        self.feed(drawing)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Add an element with its attributes."""
        self.shapes.append(_Shape(tag, {key: value or "" for key, value in attrs}, ""))

    def handle_data(self, data: str) -> None:
        """Append text to the last element."""
        last = self.shapes[-1]
        self.shapes[-1] = last._replace(words=last.words + data)


class _Canvas:
    """Axes that count units from the top left corner; `y` is the beginning of the next element."""

    def __init__(self, axes: Axes) -> None:
        self._axes, self._order, self.y = axes, 0, MARGIN

    def write(self, text: str, size: float = SIZE, *, bold: bool = False, ink: str = "ink") -> None:
        """Draw a paragraph as wide as a picture."""
        columns = int(2 * WIDTH / size)
        while any(_width(line, size, bold=bold) > WIDTH - MARGIN for line in wrap(harmless(text), columns)):
            columns -= 2
        for line in wrap(harmless(text), columns):
            self.y += 1.3 * size
            self._words(line, 0.0, self.y - 0.3 * size, size=size, bold=bold, ink=ink)
        self.y += 0.3 * size

    def add(self, picture: Picture) -> None:
        """Draw a picture with its title, legend and note, and the explanations of its numbers."""
        self.y += LINE
        self.write(picture.title, bold=True)
        self._legend(picture)
        whole, *shapes = _Shapes(picture.svg).shapes
        top, self.y = self.y, self.y + float(whole.attributes["viewbox"].split()[3])
        for shape in shapes:
            if shape.name not in ("g", "title"):
                getattr(self, f"_{shape.name}")(shape, top)
        if picture.note:
            self.write(picture.note, SIZE - 1, ink="faint")
        for shape in shapes:
            if shape.name == "title" and picture.numbered:
                self.write(shape.words, SIZE - 1)

    def _legend(self, picture: Picture) -> None:
        x, self.y = 0.0, self.y + LINE
        for entry in picture.legend:
            swatch = 20.0 if entry.class_ in _LINES else 12.0
            width = swatch + 22 + _width(entry.words, SIZE - 1)
            if x and x + width > WIDTH:
                x, self.y = 0.0, self.y + LINE
            middle = self.y - 4.5
            if entry.class_ in _LINES:
                self._stroke([(x, middle), (x + swatch, middle)], entry.class_)
            else:
                left, right, high, low = x, x + swatch, middle - 6, middle + 6
                self._fill([(left, high), (right, high), (right, low), (left, low)], entry.class_)
            self._words(entry.words, x + swatch + 6, self.y, size=SIZE - 1)
            x += width
        self.y += 8 if picture.legend else -LINE

    # ---- the elements, shifted down by `top` units ------------------------------------------------------

    def _rect(self, shape: _Shape, top: float) -> None:
        x, y = shape.number("x"), shape.number("y") + top
        right, low = x + shape.number("width"), y + shape.number("height")
        self._fill([(x, y), (right, y), (right, low), (x, low)], shape.attributes["class"])

    def _polygon(self, shape: _Shape, top: float) -> None:
        self._fill([(x, y + top) for x, y in shape.corners], shape.attributes["class"])

    def _polyline(self, shape: _Shape, top: float) -> None:
        self._stroke([(x, y + top) for x, y in shape.corners], shape.attributes["class"])

    def _line(self, shape: _Shape, top: float) -> None:
        ends = [(shape.number(f"x{end}"), shape.number(f"y{end}") + top) for end in (1, 2)]
        self._stroke(ends, shape.attributes["class"])

    def _circle(self, shape: _Shape, top: float) -> None:
        from matplotlib.patches import Circle

        center, radius = (shape.number("cx"), shape.number("cy") + top), shape.number("r")
        class_ = shape.attributes["class"].rpartition(" ")[2]
        if class_ in _LINES:
            style = _LINES[class_] | {"color": _colours()[_LINES[class_]["color"]]}
            self._axes.add_patch(Circle(center, radius, fill=False, zorder=self._above(), **style))
        else:
            self._axes.add_patch(Circle(center, radius, color=_colours()[class_], zorder=self._above()))

    def _text(self, shape: _Shape, top: float) -> None:
        class_ = shape.attributes.get("class", "")
        align = {"middle": "center", "end": "right"}.get(shape.attributes.get("text-anchor", ""), "left")
        at = shape.number("x"), shape.number("y") + top
        self._words(shape.words, *at, align=align, ink=_INKS.get(class_, "ink"), halo=class_ == "halo")

    def _words(
        self,
        words: str,
        x: float,
        y: float,
        *,
        size: float = SIZE,
        align: str = "left",
        ink: str = "ink",
        bold: bool = False,
        halo: bool = False,
    ) -> None:
        from matplotlib.patheffects import withStroke

        outline = [withStroke(linewidth=3, foreground=_colours()["paper"])] if halo else None
        self._axes.text(
            x,
            y,
            words,
            fontsize=size * UNIT * POINTS,
            horizontalalignment=align,
            verticalalignment="baseline",
            color=_colours()[ink],
            fontweight="bold" if bold else "normal",
            path_effects=outline,
            zorder=self._above(),
        )

    def _above(self) -> int:
        """Return a level above all existing shapes."""
        self._order += 1
        return self._order

    def _stroke(self, corners: Sequence[tuple[float, float]], class_: str) -> None:
        style = _LINES[class_]
        xs, ys = zip(*corners, strict=True)
        self._axes.plot(xs, ys, **style | {"color": _colours()[style["color"]]}, zorder=self._above())

    def _fill(self, corners: Sequence[tuple[float, float]], classes: str) -> None:
        """Draw an area. A `strip` is omitted: it is only a target for a pointer."""
        from matplotlib.patches import Polygon

        class_ = classes.rsplit(maxsplit=1)[-1]
        if class_ == "strip":
            return
        edge = _colours()["paper"] if "cell" in classes.split() else "none"
        fill, alpha = (_colours()["rule"], 0.35) if class_ == "band" else (_colours()[class_], 1.0)
        area = Polygon(
            corners, facecolor=fill, edgecolor=edge, linewidth=0.75, alpha=alpha, zorder=self._above()
        )
        self._axes.add_patch(area)
