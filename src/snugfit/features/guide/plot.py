"""Bar charts of the memory and speed of the guide's experiments: predicted, measured and published side by
side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from snugfit.features.guide import inference_tables
from snugfit.features.guide.inference import KINDS, InferenceGuide
from snugfit.features.guide.result import GuideResult, GuideRow, ModernRow, PublishedPrediction
from snugfit.features.guide.suite import machines
from snugfit.features.guide.tables import render
from snugfit.features.page.chart import BarFigure, BarGroup, Chart, PageParts
from snugfit.features.page.pictures import PageMaker, draw_bars
from snugfit.results.speed import StepSpeed
from snugfit.units import GIB

Figure = StepSpeed | float | None


class Series(NamedTuple):
    """One series of a bar chart, with one colour: a value for each experiment."""

    label: str
    """Text for the series of bars in the legend."""

    values: tuple[float | None, ...]
    """Values of the bars, one for each experiment; None for a missing bar."""

    ranges: tuple[tuple[float, float] | None, ...]
    """Least and largest value of each bar; None if unknown."""


def page_parts(result: GuideResult) -> PageParts:
    """Return the charts and texts of the guide's results, for a page, a plot or a notebook cell."""
    memory = memory_series(result)
    charts = [
        _chart(
            result, "GPU memory of the guide's experiments, in GiB", memory, _number(result.memory_bytes, GIB)
        ),
        _chart(result, "Samples per second of the guide's experiments", speed_series(result)),
    ]
    title = f"The single-GPU guide's experiments on {result.gpu}"
    return PageParts(title, [], charts, render(result), result.doubts)


def _chart(result: GuideResult, title: str, series: Sequence[Series], limit: float | None = None) -> Chart:
    groups = [
        BarGroup(row.name, [_bar(figures, number) for figures in series], row.why_refused)
        for number, row in enumerate(result.rows)
    ]
    return draw_bars(title, groups, [figures.label for figures in series], limit)


def _bar(series: Series, number: int) -> BarFigure | None:
    """Return the bar of one experiment; None without a value."""
    value, known = series.values[number], series.ranges[number]
    if value is None:
        return None
    low, high = known or (None, None)
    return BarFigure(value, f"{value:.2f}{f' ({low:.2f} to {high:.2f})' if known else ''}", low, high)


def memory_series(result: GuideResult) -> list[Series]:
    """Return the bars for GPU memory in GiB: predicted, measured, published, and predicted for the published
    machine.
    """
    return _series(
        result,
        lambda row: row.predicted_bytes,
        lambda row: row.measured_bytes,
        lambda row: row.needed_bytes,
        lambda then: then.predicted_bytes,
        lambda then: then.published_bytes,
        unit=GIB,
    )


def speed_series(result: GuideResult) -> list[Series]:
    """Return the bars for samples per second: predicted, measured, published, and predicted for the published
    machine.

    Predicted values have a range.
    """
    return _series(
        result,
        lambda row: row.predicted_speed,
        lambda row: row.timing.samples_per_second if row.timing else None,
        lambda row: row.speed,
        lambda then: then.predicted_speed,
        lambda then: then.published.samples_per_second,
    )


def _series(
    result: GuideResult,
    predicted: Callable[[GuideRow], Figure],
    measured: Callable[[GuideRow], Figure],
    today: Callable[[ModernRow], Figure],
    predicted_then: Callable[[PublishedPrediction], Figure],
    published: Callable[[PublishedPrediction], Figure],
    unit: int = 1,
) -> list[Series]:
    """Return a series of bars for each source (such as measured) that has a value for any experiment."""
    rows, modern = result.rows, {row.name: row for row in result.modern}
    figures: dict[str, list[Figure]] = {
        f"predicted, {result.gpu}": [*map(predicted, rows)],
        f"measured, {result.device}": [*map(measured, rows)],
        f"today's best recipe, {result.gpu}": [
            today(modern[row.name]) if row.name in modern else None for row in rows
        ],
    }
    for machine in machines().values():
        thens = [row.then_on(machine.name) for row in rows]
        label = f"predicted, {machine.gpu}, {machine.software} software"
        figures[label] = [predicted_then(then) if then else None for then in thens]
        label = f"published, {machine.gpu or f'{machine.name}, GPU not named'}"
        figures[label] = [published(then) if then else None for then in thens]
    return [
        Series(
            label,
            tuple(_number(figure, unit) for figure in values),
            tuple(figure.samples_range if isinstance(figure, StepSpeed) else None for figure in values),
        )
        for label, values in figures.items()
        if any(figure is not None for figure in values)
    ]


def _number(figure: Figure, unit: int) -> float | None:
    figure = figure.samples_per_second if isinstance(figure, StepSpeed) else figure
    return None if figure is None else figure / unit


def inference_page(result: InferenceGuide) -> PageParts:
    """Return the page with the charts of `torch.compile` backends and memory categories."""
    known = [memory_row for memory_row in result.memory if memory_row.kinds]
    kinds = [
        BarGroup(
            name,
            [
                BarFigure(memory_row.kinds[name] / GIB, f"{memory_row.kinds[name] / GIB:.2f}")
                for memory_row in known
            ],
            "",
        )
        for name in KINDS
    ]
    speeds = [
        BarGroup(
            row.name,
            [BarFigure(rate := row.speed.samples_per_second, f"{rate:.1f}") if row.speed else None],
            row.refused or row.today,
        )
        for row in result.backends
    ]
    charts = [
        draw_bars(
            "The guide's kinds of memory at the peak, in GiB",
            kinds,
            [memory_row.name for memory_row in known],
            None,
        ),
        draw_bars("Samples per second of the guide's backends", speeds, [f"predicted, {result.gpu}"], None),
    ]
    title = f"The guide's backends for inference on {result.gpu}"
    return PageParts(title, [], charts, inference_tables.render(result), result.doubts)


PAGE = PageMaker(GuideResult, page_parts)
INFERENCE_PAGE = PageMaker(InferenceGuide, inference_page)
"""Charts of both guides (training and inference) for HTML pages. The feature `page` finds them by these
names.
"""
