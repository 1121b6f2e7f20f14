"""Bars: several figures of a few names side by side, and the passages of a step's phases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup

from snugfit.report.page.picture import LegendEntry, Picture
from snugfit.report.page.svg import LETTER, WIDTH, picture, point, shorten, tag, text, ticks
from snugfit.results.step_seconds import PhaseSpan
from snugfit.units import show_seconds

THICK = 15.0
"""Height of a bar, in units."""

LANE, LEFT = 46.0, 62.0
"""Height of a lane of the timeline, and its left edge, in units."""

_PHASES = {"load": "c6", "forward": "c1", "backward": "c3", "clip": "c5", "update": "c2"}


class BarGroup(NamedTuple):
    """The bars of one name."""

    name: str
    values: Sequence[float | None]
    """One value for each series; None without one."""
    remark: str = ""
    """An addition to the name on its line."""

    ranges: Sequence[tuple[float, float] | None] = ()
    """Lower and upper limit of each value, or None; empty if no value has limits."""


def bars(
    title: str,
    groups: Sequence[BarGroup],
    series: Sequence[str],
    show: Callable[[float], str],
    *,
    bound: float | None = None,
    bound_words: str = "",
) -> Picture:
    """Return a picture with a name and bars for each group.

    Each series has a bar below the name, with its figure and, as a thin line, its range. `bound` is a line
    across all.
    """
    known = [value for group in groups for value in group.values if value is not None]
    highest = [known[1] for group in groups for known in group.ranges if known]
    figures = [figure for group in groups for figure in _figures(group, show)]
    room = 10 + LETTER * max(map(len, figures), default=0)
    scale = (WIDTH - room) / (max([*known, *highest, bound or 0.0], default=0.0) or 1.0)
    parts: list[Markup] = []
    y = 4.0
    for number, group in enumerate(groups):
        words = f"{group.name} · {group.remark}" if group.remark else group.name
        shapes = [text(shorten(words, WIDTH - 4), 0, y + 13)]
        y += 20
        shown = _figures(group, show)
        for index, (value, likely) in enumerate(zip(group.values, _ranges(group), strict=True)):
            if value is not None:
                ends = (likely[0] * scale, likely[1] * scale) if likely else None
                shapes += _bar(index, value * scale, y, shown[index], ends)
                y += THICK + 3
        y += 12
        figures = [f"{name} {figure}" for name, figure in zip(series, shown, strict=True) if figure]
        parts.append(point(f"{words}: {', '.join(figures) or 'not known'}", *shapes, start=number == 0))
    legend = [LegendEntry(f"c{index}", name) for index, name in enumerate(series)] if len(series) > 1 else []
    if bound is not None:
        parts.insert(0, tag("line", x1=bound * scale, x2=bound * scale, y1=0, y2=y, class_="bound"))
        legend.append(LegendEntry("bound", f"{bound_words}, {show(bound)}"))
    rows = [(group.name, *_figures(group, show), group.remark) for group in groups]
    return Picture(
        title=title,
        svg=picture(f"Bars: {title}", y, *parts),
        heads=("Name", *(f"{name}>" for name in series), "Remark"),
        rows=rows,
        legend=tuple(legend),
    )


def _ranges(group: BarGroup) -> Sequence[tuple[float, float] | None]:
    return group.ranges or [None] * len(group.values)


def _figures(group: BarGroup, show: Callable[[float], str]) -> list[str]:
    """Return the figures next to the bars: `9.30 (6.89 to 14.31)`; empty without a value."""
    shown = []
    for value, likely in zip(group.values, _ranges(group), strict=True):
        between = f" ({show(likely[0])} to {show(likely[1])})" if likely else ""
        shown.append("" if value is None else f"{show(value)}{between}")
    return shown


def _bar(
    index: int, length: float, y: float, figure: str, ends: tuple[float, float] | None
) -> Iterable[Markup]:
    """Yield one bar of that length, the line of its range, and its figure."""
    yield tag("rect", x=0, y=y, width=max(1.0, length), height=THICK, class_=f"shape c{index}")
    if ends:
        middle = y + THICK / 2
        yield tag("line", x1=ends[0], x2=ends[1], y1=middle, y2=middle, class_="reserved")
    yield text(figure, max(length, *(ends or (0.0,))) + 5, y + 12, class_="halo")


def timeline(spans: Sequence[PhaseSpan], step_seconds: float) -> Picture:
    """Return a picture of the times at which the host launches and the device runs each phase of the steady
    step."""
    end = max([step_seconds, *(span.end_seconds for span in spans)])
    scale = (WIDTH - LEFT - 8) / end
    lanes = {"host": 8.0, "device": 8.0 + LANE + 8}
    base = 8.0 + 2 * LANE + 16
    parts = [*_time_axis(end, scale, base)]
    parts += [text(lane, 0, y + LANE / 2 + 4) for lane, y in lanes.items()]
    for number, span in enumerate(spans):
        x, width = LEFT + span.start_seconds * scale, (span.end_seconds - span.start_seconds) * scale
        y = lanes[span.lane]
        colour = f"cell shape {_PHASES.get(span.phase, 'c7')}"
        shapes = [tag("rect", x=x, y=y, width=max(1.0, width), height=LANE, class_=colour)]
        if LETTER * len(span.phase) <= width - 8:
            shapes.append(text(span.phase, x + 4, y + LANE / 2 + 4, class_="on"))
        parts.append(point(_about(span), *shapes, start=number == 0))
    phases = [phase for phase in _PHASES if any(span.phase == phase for span in spans)]
    return Picture(
        title=f"Host and device in one steady step, {show_seconds(step_seconds)} from step to step",
        svg=picture("When the host and the device work in one steady step.", base + 24, *parts),
        heads=("Where", "Phase", "From>", "To>", "Of that busy>"),
        rows=[
            (
                span.lane,
                span.phase,
                show_seconds(span.start_seconds),
                show_seconds(span.end_seconds),
                show_seconds(span.busy_seconds),
            )
            for span in spans
        ],
        legend=tuple(LegendEntry(_PHASES[phase], phase) for phase in phases),
        note="The host launches kernels before the device runs them, also those of the next step; when about "
        "1,000 are waiting, it waits too.",
    )


def _about(span: PhaseSpan) -> str:
    return (
        f"{span.lane}, {span.phase}: from {show_seconds(span.start_seconds)} to "
        f"{show_seconds(span.end_seconds)}, at work {show_seconds(span.busy_seconds)} of it"
    )


def _time_axis(end: float, scale: float, base: float) -> Iterable[Markup]:
    unit, name = (1.0, "s") if end >= 1 else (1e-3, "ms")
    for tick in ticks(end / unit, count=6):
        x = LEFT + tick * unit * scale
        yield tag("line", x1=x, x2=x, y1=0, y2=base - 4, class_="rule")
        if x < WIDTH - 40:
            yield text(f"{tick:g} {name}", x, base + 12, anchor="middle", class_="faint")
