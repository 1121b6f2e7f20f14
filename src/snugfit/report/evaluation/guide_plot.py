"""The guide's plot: memory and speed of all experiments, predicted, measured and published side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.evaluation.guide_result import GuideResult
from snugfit.evaluation.guide_suite import Machine, machines
from snugfit.report.text.figure import BLUE, GREEN, LIGHT_BLUE, ORANGE, RED, drawing
from snugfit.results.speed import StepSpeed
from snugfit.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 12.5
"""Of the whole figure, in inches."""
_HEIGHT_OF_ROW = 0.56
_LABEL_COLUMNS = 26
_UNDER_BARS = 0.47
"""Down from the middle of a row, in rows."""

_ABOVE_BAR = 0.32
"""Up from the middle of a row, in rows: above its only bar."""


class Series(NamedTuple):
    """One colour of bars."""

    label: str
    """As the legend has it."""

    color: str
    """As matplotlib writes colours."""

    values: tuple[float | None, ...]
    """One for each experiment; None where there is none."""

    ranges: tuple[tuple[float, float] | None, ...] = ()
    """Between which values each lies, where that is known."""


def summary(result: GuideResult, form: str) -> bytes:
    """The plot as a `png` or an `svg` file's bytes."""
    names = [fill(row.name, _LABEL_COLUMNS) for row in result.rows]
    with drawing(form, width=_WIDTH, height=1.8 + _HEIGHT_OF_ROW * len(names)) as drawn:
        figure = drawn.figure
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        _bars(left, memory_series(result))
        _diamonds(left, result)
        for row_number, row in enumerate(result.rows):
            if row.refused:
                above = _ABOVE_BAR if result.modern else 0.0
                left.text(0.05, row_number - above, "not predicted", fontsize=7, color="0.4", va="center")
        _bars(right, speed_series(result))
        left.set_yticks(range(len(names)), names)
        left.set_ylim(len(names) - 0.4, -0.6)
        left.set_xlabel("GPU memory, GiB")
        right.set_xlabel("Samples per second; lines: nine in ten steps")
        if result.memory_bytes:
            left.axvline(
                result.memory_bytes / GIB,
                color="0.4",
                linewidth=0.8,
                linestyle=":",
                label=f"memory, {result.gpu}",
            )
        figure.suptitle("The guide's experiments: memory and speed", fontsize=12)
        handles, labels = _legend((left, right))
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return drawn.content


def memory_series(result: GuideResult) -> list[Series]:
    """GiB of GPU memory: predicted, measured, published, and predicted for the published machine."""
    rows = result.rows
    series = [
        Series(f"predicted, {result.gpu}", BLUE, tuple(_gib(row.predicted_bytes) for row in rows)),
        Series(f"measured, {result.device}", GREEN, tuple(_gib(row.measured_bytes) for row in rows)),
        *_todays_memory(result),
    ]
    for machine in _named_machines():
        thens = [row.then_on(machine.name) for row in rows]
        predicted = tuple(_gib(then.predicted_bytes if then else None) for then in thens)
        series.append(Series(f"predicted, {machine.gpu}, {machine.software} software", LIGHT_BLUE, predicted))
        published = tuple(_gib(then.published_bytes if then else None) for then in thens)
        series.append(Series(f"published, {machine.gpu}", ORANGE, published))
    return _with_values(series)


def speed_series(result: GuideResult) -> list[Series]:
    """Samples per second: predicted with their spread, measured, published, and predicted for the published
    machine."""
    rows = result.rows
    speeds = tuple(row.timing.samples_per_second if row.timing else None for row in rows)
    series = [
        _with_ranges(f"predicted, {result.gpu}", BLUE, [row.predicted_speed for row in rows]),
        Series(f"measured, {result.device}", GREEN, speeds),
        *_todays_speed(result),
    ]
    for machine in _named_machines():
        thens = [row.then_on(machine.name) for row in rows]
        label = f"predicted, {machine.gpu}, {machine.software} software"
        then_speeds = [then.predicted_speed if then else None for then in thens]
        series.append(_with_ranges(label, LIGHT_BLUE, then_speeds))
        values = tuple(then.published.samples_per_second if then else None for then in thens)
        series.append(Series(f"published, {machine.gpu}", ORANGE, values))
    return _with_values(series)


def _todays_memory(result: GuideResult) -> Iterator[Series]:
    """The bars of today's recipes, where they were asked for."""
    today = {row.name: _gib(row.needed_bytes) for row in result.modern}
    if today:
        yield Series(_todays_label(result), RED, tuple(today.get(row.name) for row in result.rows))


def _todays_speed(result: GuideResult) -> Iterator[Series]:
    """The same for their speed."""
    today = {row.name: row.speed for row in result.modern}
    if today:
        yield _with_ranges(_todays_label(result), RED, [today.get(row.name) for row in result.rows])


def _todays_label(result: GuideResult) -> str:
    return f"today's best recipe, {result.gpu}"


def _with_ranges(label: str, color: str, speeds: Sequence[StepSpeed | None]) -> Series:
    values = tuple(speed.samples_per_second if speed else None for speed in speeds)
    return Series(label, color, values, tuple(speed.samples_range if speed else None for speed in speeds))


def _named_machines() -> list[Machine]:
    """The machines of the published figures whose GPU is known."""
    return [machine for machine in machines().values() if machine.gpu]


def _with_values(series: list[Series]) -> list[Series]:
    return [one for one in series if any(value is not None for value in one.values)]


def _bars(axes: Axes, series: list[Series]) -> None:
    """Each experiment's bars under each other; only those that it has take room."""
    count = len(series[0].values) if series else 0
    highest = [value or 0 for one in series for value in one.values]
    widest = max([*highest, *(known[1] for one in series for known in one.ranges if known)], default=0)
    for row_number in range(count):
        present = [one for one in series if one.values[row_number] is not None]
        height = 0.84 / max(len(present), 2)
        for order, one in enumerate(present):
            value = one.values[row_number] or 0.0
            at = row_number + (order - (len(present) - 1) / 2) * height
            axes.barh(at, value, height=0.92 * height, color=one.color)
            end = value
            if one.ranges and (known := one.ranges[row_number]):
                axes.plot(known, (at, at), color="0.2", linewidth=0.8)
                end = max(value, known[1])
            axes.text(end + widest * 0.008, at, f"{value:.1f}", va="center", fontsize=6.5, color="0.2")
    for one in series:
        axes.barh(0, 0, color=one.color, label=one.label)
    axes.set_xlim(0, widest * 1.1 or 1)
    axes.grid(axis="x", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def _diamonds(axes: Axes, result: GuideResult) -> None:
    """Published figures of machines that name no GPU: a mark, since no prediction can stand beside them."""
    known = machines()
    points = [
        (then.published_bytes / GIB, row_number + _UNDER_BARS)
        for row_number, row in enumerate(result.rows)
        for then in row.then
        if not known[then.published.machine].gpu
    ]
    if points:
        x, y = zip(*points, strict=True)
        axes.scatter(
            x,
            y,
            marker="D",
            s=22,
            color="0.25",
            edgecolors="white",
            linewidths=0.8,
            zorder=3,
            label="published, GPU not named",
        )


def _legend(panels: tuple[Axes, Axes]) -> tuple[list[Any], list[str]]:
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    return list(handles.values()), list(handles)


def _gib(size: int | None) -> float | None:
    return None if size is None else size / GIB
