"""Memory and speed of all experiments as bars: predicted, measured and published side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from snugfit.features.guide.result import GuideResult
from snugfit.features.guide.suite import Machine, machines
from snugfit.features.guide.tables import render
from snugfit.report.page.bars import BarGroup, bars
from snugfit.report.page.picture import Picture
from snugfit.report.pictures import PageParts
from snugfit.results.speed import StepSpeed
from snugfit.units import GIB


class Series(NamedTuple):
    """One colour of bars."""

    label: str
    """As the legend has it."""

    values: tuple[float | None, ...]
    """One for each experiment; None where there is none."""

    ranges: tuple[tuple[float, float] | None, ...] = ()
    """Between which values each lies, where that is known."""


def page_parts(result: GuideResult) -> PageParts:
    """Return the page and the plot of a result."""
    memory = memory_series(result)
    pictures = [
        _picture(result, "GPU memory of the guide's experiments, in GiB", memory, _gib(result.memory_bytes)),
        _picture(result, "Samples per second of the guide's experiments", speed_series(result)),
    ]
    title = f"The single-GPU guide's experiments on {result.gpu}"
    return PageParts(title, [], pictures, render(result), result.doubts)


def _picture(
    result: GuideResult, title: str, series: Sequence[Series], bound: float | None = None
) -> Picture:
    groups = [
        BarGroup(
            row.name,
            [one.values[number] for one in series],
            row.why_refused,
            [one.ranges[number] if one.ranges else None for one in series],
        )
        for number, row in enumerate(result.rows)
    ]
    labels = [one.label for one in series]
    words = f"memory, {result.gpu}"
    return bars(title, groups, labels, "{:.2f}".format, bound=bound, bound_words=words)


def memory_series(result: GuideResult) -> list[Series]:
    """GiB of GPU memory: predicted, measured, published, and predicted for the published machine."""
    rows = result.rows
    series = [
        Series(f"predicted, {result.gpu}", tuple(_gib(row.predicted_bytes) for row in rows)),
        Series(f"measured, {result.device}", tuple(_gib(row.measured_bytes) for row in rows)),
        *_todays_memory(result),
    ]
    for machine in machines().values():
        thens = [row.then_on(machine.name) for row in rows]
        predicted = tuple(_gib(then.predicted_bytes if then else None) for then in thens)
        series.append(Series(_label_of_predicted(machine), predicted))
        published = tuple(_gib(then.published_bytes if then else None) for then in thens)
        series.append(Series(_label_of_published(machine), published))
    return _with_values(series)


def speed_series(result: GuideResult) -> list[Series]:
    """Samples per second: predicted with their spread, measured, published, and predicted for the published
    machine."""
    rows = result.rows
    speeds = tuple(row.timing.samples_per_second if row.timing else None for row in rows)
    series = [
        _with_ranges(f"predicted, {result.gpu}", [row.predicted_speed for row in rows]),
        Series(f"measured, {result.device}", speeds),
        *_todays_speed(result),
    ]
    for machine in machines().values():
        thens = [row.then_on(machine.name) for row in rows]
        then_speeds = [then.predicted_speed if then else None for then in thens]
        series.append(_with_ranges(_label_of_predicted(machine), then_speeds))
        values = tuple(then.published.samples_per_second if then else None for then in thens)
        series.append(Series(_label_of_published(machine), values))
    return _with_values(series)


def _label_of_predicted(machine: Machine) -> str:
    return f"predicted, {machine.gpu}, {machine.software} software"


def _label_of_published(machine: Machine) -> str:
    return f"published, {machine.gpu or f'{machine.name}, GPU not named'}"


def _todays_memory(result: GuideResult) -> Iterator[Series]:
    """The bars of today's recipes, where they were asked for."""
    today = {row.name: _gib(row.needed_bytes) for row in result.modern}
    if today:
        yield Series(_todays_label(result), tuple(today.get(row.name) for row in result.rows))


def _todays_speed(result: GuideResult) -> Iterator[Series]:
    """The same for their speed."""
    today = {row.name: row.speed for row in result.modern}
    if today:
        yield _with_ranges(_todays_label(result), [today.get(row.name) for row in result.rows])


def _todays_label(result: GuideResult) -> str:
    return f"today's best recipe, {result.gpu}"


def _with_ranges(label: str, speeds: Sequence[StepSpeed | None]) -> Series:
    values = tuple(speed.samples_per_second if speed else None for speed in speeds)
    return Series(label, values, tuple(speed.samples_range if speed else None for speed in speeds))


def _with_values(series: list[Series]) -> list[Series]:
    return [one for one in series if any(value is not None for value in one.values)]


def _gib(size: int | None) -> float | None:
    return None if size is None else size / GIB
