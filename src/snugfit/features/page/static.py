"""The charts of a command's result as one `png` or `svg` file of matplotlib, for `--plot` and notebooks.

The file is a column of blocks: sentences, the legend, and each chart with its title and note. Each block has
a known height in inches. So the figure's height is their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.features.page.chart import Bars, Chart, Front, Layer, MemoryCurve, ModuleMap, PageParts, Timeline
from snugfit.features.page.colours import LIMIT, LINES, PAPER, PHASES, RESERVED, colours_of
from snugfit.report.text.figure import drawing
from snugfit.report.text.passages import Passage
from snugfit.report.text.terminal import harmless
from snugfit.results.prediction import ModuleLine
from snugfit.units import GIB, MIB, show_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, MARGIN = 8.75, 0.2
"""Width of the figure and of its margin, in inches."""

LINE, LETTER = 0.19, 0.076
"""Height of a text line and width of a letter in inches, both a little above their means."""

SIZE, SMALL, LARGE = 9, 8, 12
"""Font sizes in points."""

MOST_MODULES, LONGEST_NAME = 14, 40
"""Largest number of modules in a static picture, and of letters in a module's name."""

COARSE = 120
"""Largest number of positions of a curve in a notebook's picture."""

APART = 0.02
"""Smallest distance between two points, as a share of the picture, at which both are numbered."""


class PlotBlock(NamedTuple):
    """A block of the picture, with the heights of its parts in inches."""

    height: float
    draw: Callable[[Axes], None]
    left: float = 0.0
    above: float = 0.0
    """Height above the drawing area for a title, in inches."""
    below: float = 0.0
    """Height below the drawing area for the names on an axis, in inches."""


def draw(parts: PageParts, form: str, *, with_words: bool = True, coarse: bool = False) -> bytes:
    """Return a picture of a result as a file: the headline, the charts and the warnings.

    Without `with_words` the file has the charts alone. A `coarse` file has fewer points, and letters as text
    instead of paths.
    """
    blocks = [_words([parts.title, *parts.lines], bold=True)] if with_words else []
    blocks += [_legend(parts)] if parts.meanings else []
    for chart in parts.charts:
        blocks += _chart_blocks(replace(chart, drawing=_thin(chart.drawing)) if coarse else chart, parts)
    blocks += [_words([f"Uncertain: {doubt}" for doubt in parts.doubts])] if with_words else []
    blocks = [block for block in blocks if block.height]
    height = sum(block.height for block in blocks) + 2 * MARGIN
    with drawing(form, width=WIDTH, height=height, text_as_text=coarse) as drawn:
        # The blocks have sizes in inches, which a layout engine would change.
        drawn.figure.set_layout_engine("none")
        ends = accumulate((block.height for block in blocks), initial=MARGIN)
        for block, top in zip(blocks, ends, strict=False):
            # matplotlib counts from the bottom, while the blocks count from the top.
            left, low = MARGIN + block.left, height - top - block.height + block.below
            size = WIDTH - MARGIN - left, block.height - block.above - block.below
            box = (left / WIDTH, low / height, size[0] / WIDTH, size[1] / height)
            block.draw(drawn.figure.add_axes(box))
    return drawn.content


def _thin(shape: Any) -> Any:
    """Reduce a memory curve to the highest point of each short interval. Return other charts unchanged."""
    if not isinstance(shape, MemoryCurve) or len(shape.positions) <= COARSE:
        return shape
    totals = [sum(sizes) for sizes in zip(*(layer.bytes for layer in shape.layers), strict=True)]
    edges = [round(number * len(totals) / COARSE) for number in range(COARSE + 1)]
    taken = [max(range(*pair), key=totals.__getitem__) for pair in pairwise(edges)]
    return replace(
        shape,
        positions=[shape.positions[index] for index in taken],
        layers=[
            Layer(kind=layer.kind, bytes=[layer.bytes[index] for index in taken]) for layer in shape.layers
        ],
        reserved=[shape.reserved[index] for index in taken],
        peak=taken.index(shape.peak) if shape.peak in taken else 0,
    )


# ---- words and legend --------------------------------------------------------------------------------------


def _words(paragraphs: Sequence[str], *, bold: bool = False, size: int = SIZE) -> PlotBlock:
    """Return a block of the picture with wrapped paragraphs of text. With `bold`, the first one is large."""
    room = WIDTH - 2 * MARGIN
    lines = []
    for number, paragraph in enumerate(paragraphs):
        large = bold and number == 0
        columns = int(room / LETTER * SIZE / (LARGE * 1.15 if large else size))
        lines += [(line, large) for line in wrap(harmless(paragraph), columns)]
    ends = [*accumulate((1.5 if large else 1.0 for _, large in lines), initial=0.0)]

    def fill(axes: Axes) -> None:
        axes.axis("off")
        # The axis is inverted, so that lines count from the top.
        axes.set(xlim=(0.0, 1.0), ylim=(ends[-1], 0.0))
        for (line, large), end in zip(lines, ends[1:], strict=True):
            _text(axes, 0.0, end - 0.3, line, fontsize=LARGE if large else size, bold=large)

    return PlotBlock(LINE * ends[-1] + (0.1 if lines else 0.0), fill)


def _text(axes: Axes, x: float, y: float, words: str, *, bold: bool = False, **style: Any) -> None:
    weight = "bold" if bold else "normal"
    plain: dict[str, Any] = {"color": PAPER["ink"], "fontweight": weight, "fontsize": SIZE}
    axes.text(x, y, harmless(words), **plain | style)


def _legend(parts: PageParts) -> PlotBlock:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    colours = colours_of(parts.meanings)
    names = [*parts.meanings]
    columns = max(1, int((WIDTH - 2 * MARGIN) / (LETTER * max(map(len, names)) + 0.5)))

    def fill(axes: Axes) -> None:
        axes.axis("off")
        rows = [
            Line2D([], [], label=harmless(name), **_line_style(name))
            if name in LINES
            else Patch(facecolor=colours[name], label=harmless(name))
            for name in names
        ]
        position: dict[str, Any] = {"loc": "upper left", "borderaxespad": 0.0, "frameon": False}
        axes.legend(handles=rows, ncols=columns, fontsize=SMALL, **position)

    return PlotBlock(LINE * -(-len(names) // columns) + 0.15, fill)


def _line_style(meaning: str) -> dict[str, Any]:
    if meaning == LIMIT:
        return {"color": PAPER["bad"], "linestyle": (0, (4, 2.5)), "linewidth": 1.5}
    if meaning == RESERVED:
        return {"color": PAPER["ink"], "linewidth": 1.1}
    ring = {"marker": "o", "markerfacecolor": "none", "markeredgecolor": PAPER["good"], "markeredgewidth": 2}
    return {"linestyle": "none", "markersize": 9, **ring}


# ---- charts ------------------------------------------------------------------------------------------------


def _chart_blocks(chart: Chart, parts: PageParts) -> list[PlotBlock]:
    """Return the blocks of the picture for one chart: its title, drawing, note, and the explanation of its
    numbers.
    """
    colours = colours_of(parts.meanings)
    shape = chart.drawing
    if isinstance(shape, MemoryCurve):
        drawn = PlotBlock(
            3.4,
            lambda axes: _memory(axes, shape, colours),
            left=0.5,
            above=0.15,
            below=0.5 if shape.micro_batches else 0.3,
        )
    elif isinstance(shape, ModuleMap):
        drawn = _modules(shape, colours)
    elif isinstance(shape, Bars):
        drawn = _bars(shape, colours)
    elif isinstance(shape, Timeline):
        drawn = PlotBlock(1.5, lambda axes: _timeline(axes, shape), left=0.5, above=0.05, below=0.3)
    else:
        drawn = PlotBlock(4.0, lambda axes: _front(axes, shape), left=0.5, above=0.2, below=0.55)
    points = shape.points if isinstance(shape, Front) else ()
    names = [f"{point.number}: {point.recipe}: {point.label}" for point in points]
    notes = [_words([chart.note, *names], size=SMALL)] if chart.note or names else []
    return [PlotBlock(0.15, _empty), _heading(chart.title), drawn, *notes]


def _empty(axes: Axes) -> None:
    axes.axis("off")


def _heading(title: str) -> PlotBlock:
    lines = wrap(harmless(title), int((WIDTH - 2 * MARGIN) / LETTER * 0.85))

    def fill(axes: Axes) -> None:
        axes.axis("off")
        axes.set(xlim=(0.0, 1.0), ylim=(float(len(lines)), 0.0))
        for number, line in enumerate(lines, 1):
            _text(axes, 0.0, number - 0.3, line, bold=True)

    return PlotBlock(LINE * len(lines) + 0.05, fill)


def _unit(top: float) -> tuple[int, str]:
    return (GIB, "GiB") if top >= GIB else (MIB, "MiB")


def _byte_axis(axes: Axes, top: float) -> int:
    """Scale an axis of bytes from 0 to `top`, and return the number of bytes in its unit, such as GiB."""
    unit, name = _unit(top)
    axes.set_ylim(0.0, 1.08 * top / unit)
    axes.set_ylabel(name, fontsize=SIZE)
    axes.grid(axis="y", color=PAPER["rule"], linewidth=0.6)
    axes.set_axisbelow(True)
    return unit


def _memory(axes: Axes, curve: MemoryCurve, colours: dict[str, str]) -> None:
    totals = [sum(sizes) for sizes in zip(*(layer.bytes for layer in curve.layers), strict=True)]
    unit = _byte_axis(axes, max(*curve.reserved, *totals, curve.limit or 0))
    # The last value lasts until the end of the step, so it is repeated there.
    xs = [*curve.positions, 1.0]

    def to_units(sizes: Sequence[int]) -> list[float]:
        return [round(size / unit, 4) for size in (*sizes, sizes[-1])]

    for phase in curve.phases:
        if phase.name in ("backward", "update"):
            axes.axvspan(phase.start, phase.end, color=PHASES.get(phase.name, PHASES["forward"]), linewidth=0)
    axes.stackplot(
        xs,
        *(to_units(layer.bytes) for layer in curve.layers),
        colors=[colours[layer.kind] for layer in curve.layers],
        linewidth=0,
    )
    axes.plot(xs, to_units(curve.reserved), **_line_style(RESERVED))
    if curve.limit:
        axes.axhline(curve.limit / unit, **_line_style(LIMIT))
    axes.set_xlim(0.0, 1.0)
    # The left edge of this chart's block is 0.5 inches wide.
    room = WIDTH - 2 * MARGIN - 0.5
    _passages(axes, curve.phases, room, minor=False)
    _passages(axes, curve.micro_batches, room, minor=True)
    _mark_peak(axes, xs[curve.peak], totals[curve.peak] / unit, curve.peak_label)


def _passages(axes: Axes, passages: Sequence[Passage], room: float, *, minor: bool) -> None:
    """Write the names of the step's phases below a time axis where they are wide enough. Names of
    micro-batches are below those of phases.
    """
    shown = [one for one in passages if LETTER * len(one.name) <= (one.end - one.start) * room]
    middles = [(one.start + one.end) / 2 for one in shown]
    axes.set_xticks(middles, [one.name for one in shown], minor=minor, fontsize=SMALL)
    # Minor tick labels form a second row below the major ones.
    axes.tick_params(axis="x", which="minor" if minor else "major", length=0, pad=17 if minor else 4)


def _mark_peak(axes: Axes, x: float, y: float, label: str) -> None:
    axes.plot([x], [y], "o", color=PAPER["ink"], markeredgecolor="white", markersize=6)
    # The label is on the side with more space, inside of the axes.
    far, top = x > 0.5, axes.get_ylim()[1]
    lines = wrap(harmless(label), int(0.45 * WIDTH / LETTER))
    axes.annotate(
        "\n".join(lines),
        (x, y),
        xytext=(-10 if far else 10, -14 if y > 0.6 * top else 14),
        textcoords="offset points",
        horizontalalignment="right" if far else "left",
        verticalalignment="top" if y > 0.6 * top else "bottom",
        fontsize=SMALL,
        bbox={"boxstyle": "round,pad=0.6", "facecolor": "white", "edgecolor": PAPER["ink"], "linewidth": 0.6},
    )


def _modules(shape: ModuleMap, colours: dict[str, str]) -> PlotBlock:
    """Draw a bar chart of the largest modules, each bar divided by category of memory."""
    by_module: dict[str, list[ModuleLine]] = {}
    for line in shape.lines:
        by_module.setdefault(line.module or "(the loop)", []).append(line)
    sizes = {name: sum(line.bytes for line in lines) for name, lines in by_module.items()}
    largest = sorted(sizes, key=lambda name: -sizes[name])
    shown, rest = largest[:MOST_MODULES], largest[MOST_MODULES:]
    names = [*shown, *([f"{len(rest)} smaller modules"] if rest else [])]
    lines = [by_module[name] for name in shown]
    lines += [[line for name in rest for line in by_module[name]]] if rest else []

    def fill(axes: Axes) -> None:
        highest = max(sum(line.bytes for line in part) for part in lines)
        for row, part in enumerate(lines):
            start = 0
            for kind in dict.fromkeys(line.kind for line in part):
                size = sum(line.bytes for line in part if line.kind == kind)
                axes.barh(row, size, left=start, height=0.75, color=colours[kind], linewidth=0)
                start += size
            _text(axes, start + 0.01 * highest, row + 0.2, show_bytes(start), fontsize=SMALL)
        axes.set(ylim=(len(lines) - 0.4, -0.6), xlim=(0.0, 1.25 * highest))
        axes.set_yticks(range(len(names)), [_tail(name) for name in names], fontsize=SMALL)
        axes.tick_params(axis="y", length=0)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)

    return PlotBlock(0.21 * len(names) + 0.1, fill, left=0.07 * LONGEST_NAME)


def _tail(name: str) -> str:
    """Return the end of a module's name that fits next to its bar in a chart."""
    clean = harmless(name)
    return clean if len(clean) <= LONGEST_NAME else f"…{clean[-LONGEST_NAME + 1 :]}"


def _bars(shape: Bars, colours: dict[str, str]) -> PlotBlock:
    """Draw the bars of each group, one for each series, with its value at the right of each bar."""
    room = WIDTH - 2 * MARGIN
    labels = [bar.label for group in shape.groups for bar in group.bars if bar]
    # The axis is longer than the longest bar, with space for the widest label.
    top = shape.top * room / (room - LETTER * max(map(len, labels), default=0) - 0.1)
    headed = [f"{group.name} · {group.remark}" if group.remark else group.name for group in shape.groups]
    names = [wrap(harmless(name), int(room / LETTER)) for name in headed]
    heights = [
        LINE * len(lines) + 0.2 * sum(bar is not None for bar in group.bars) + 0.12
        for lines, group in zip(names, shape.groups, strict=True)
    ]

    def fill(axes: Axes) -> None:
        axes.axis("off")
        axes.set(xlim=(0.0, top), ylim=(sum(heights), 0.0))
        for lines, group, y in zip(names, shape.groups, accumulate(heights, initial=0.0), strict=False):
            for number, line in enumerate(lines, 1):
                _text(axes, 0.0, y + LINE * number - 0.05, line)
            low = y + LINE * len(lines)
            for series, bar in zip(shape.series, group.bars, strict=True):
                if bar is None:
                    continue
                axes.barh(low + 0.09, bar.value, height=0.15, color=colours[series], linewidth=0)
                if bar.low is not None and bar.high is not None:
                    axes.plot([bar.low, bar.high], [low + 0.09] * 2, color=PAPER["ink"], linewidth=1)
                end = max(bar.value, bar.high or 0.0) + 0.008 * top
                _text(axes, end, low + 0.14, bar.label, fontsize=SMALL)
                low += 0.2
        if shape.limit:
            axes.axvline(shape.limit, zorder=0, **_line_style(LIMIT))

    return PlotBlock(sum(heights) + 0.05, fill)


def _timeline(axes: Axes, shape: Timeline) -> None:
    rows = {"host": 0, "device": 1}
    unit, name = (1.0, "s") if shape.end_seconds >= 1 else (1e-3, "ms")
    for span in shape.spans:
        start, length = span.start_seconds / unit, (span.end_seconds - span.start_seconds) / unit
        colour = PHASES.get(span.phase, PHASES["load"])
        axes.barh(rows[span.lane], length, left=start, height=0.85, color=colour, edgecolor="white")
        if LETTER * len(span.phase) + 0.15 <= length * unit / shape.end_seconds * (WIDTH - 2 * MARGIN - 0.5):
            _text(axes, start + 0.004 * shape.end_seconds / unit, rows[span.lane] + 0.1, span.phase)
    axes.set(xlim=(0.0, shape.end_seconds / unit), ylim=(1.5, -0.5))
    axes.set_yticks([0, 1], ["host", "GPU"], fontsize=SMALL)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=SMALL)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} {name}")


def _front(axes: Axes, shape: Front) -> None:
    """Draw the recipes of a Pareto front as points. A point too close to a numbered one has no number, but
    the best recipe always has one.
    """
    unit = _byte_axis(axes, max(*(point.bytes for point in shape.points), shape.limit or 0))
    # Without predicted seconds all speeds are 0, and the axis still needs a length.
    fastest = 1.08 * max(point.speed for point in shape.points) or 1.0
    axes.set_xlim(0.0, fastest)
    axes.set_xlabel(f"{shape.item} per second", fontsize=SIZE)
    stairs = sorted((point.speed, point.bytes / unit) for point in shape.points)
    axes.step(*zip(*stairs, strict=True), where="pre", color=PAPER["rule"], linewidth=1)
    if shape.limit:
        axes.axhline(shape.limit / unit, **_line_style(LIMIT))
    top = axes.get_ylim()[1]
    numbered: list[tuple[float, float]] = []
    # The best recipe comes first, so that it always gets its number.
    for point in sorted(shape.points, key=lambda point: not point.best):
        x, y = point.speed, point.bytes / unit
        face = PAPER["ink"] if point.fits else "white"
        axes.plot([x], [y], "o", color=face, markeredgecolor=PAPER["ink"], markersize=6)
        if point.best:
            axes.plot([x], [y], **_line_style("") | {"markersize": 12})
        if all(abs(x - a) > 2 * APART * fastest or abs(y - b) > 2 * APART * top for a, b in numbered):
            numbered.append((x, y))
            _text(
                axes, x - 0.01 * fastest, y + 0.02 * top, str(point.number),
                fontsize=SMALL, horizontalalignment="right",
            )  # fmt: skip
