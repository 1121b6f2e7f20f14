"""The page, plot and notebook output for each type of result, such as a prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from snugfit.comparison.compare import Comparison
from snugfit.comparison.recipes import RecipeComparison
from snugfit.feature_folders import feature_objects
from snugfit.features.page import headlines
from snugfit.features.page.chart import BarFigure, BarGroup, Bars, Chart, PageParts
from snugfit.features.page.colours import GPU_MEMORY, MEASURED, PREDICTED
from snugfit.features.page.document import document
from snugfit.features.page.front import draw_front
from snugfit.features.page.memory import memory_over_step
from snugfit.features.page.modules import modules_at_peak, timeline
from snugfit.planning.fleet.gpu_plans import GpuPlans
from snugfit.planning.fleet.prices import Prices
from snugfit.planning.plan import Plan
from snugfit.report import compare, measurement, prediction
from snugfit.report.plan import gpu_plans, plan
from snugfit.report.text.job import job_line
from snugfit.results.measurement import Measurement
from snugfit.results.prediction import Prediction
from snugfit.results.speed import StepSpeed
from snugfit.units import show_bytes, show_seconds
from snugfit.versions import versions

MOST_STEPS = 100
"""Largest number of timed steps in a picture."""

SHOWN_VERSIONS = ("snugfit", "torch", "transformers")
"""Packages whose versions a page shows."""

BESIDE = (PREDICTED, MEASURED)


@dataclass(frozen=True)
class PageMaker:
    """Functions that make the page for one class of result, such as predictions. Another feature provides
    those for its own results in its `plot.py`.
    """

    kind: type
    parts: Callable[[Any], PageParts]


def parts_of(answer: object) -> PageParts | None:
    """Return the page's parts for this result; None if it has no charts. A `PageParts` is returned
    unchanged.
    """
    if isinstance(answer, PageParts):
        return answer
    if make := _PARTS.get(type(answer)):
        return make(answer)
    makers = feature_objects("plot", PageMaker)
    return next((one.parts(answer) for one in makers if isinstance(answer, one.kind)), None)


def draw_page(parts: PageParts, used: Mapping[str, str], *, command: str = "") -> bytes:
    """Return the charts and the report of a result as one self-contained HTML page.

    `used` has the versions of packages behind the result, and `command` is the command line that produced it.
    """
    named = versions() | dict(used)
    shown = {name: named[name] for name in SHOWN_VERSIONS if name in named}
    return document(parts, command=command, versions=shown, when=datetime.now().astimezone()).encode()


def draw_prediction(one: Prediction) -> list[Chart]:
    """Return the charts of a prediction: memory during the step, memory by module, and the step's timeline.
    Charts without predicted data are left out.
    """
    anatomy, charts = one.anatomy, []
    if anatomy.curve and anatomy.curve[0].kinds:
        over_step = memory_over_step(
            anatomy.curve,
            context_bytes=one.footprint.context_bytes or 0,
            memory_bytes=one.memory_bytes,
            micro_batches=one.recipe.pieces,
            moment=one.footprint.at,
            turn=one.job.words.turn,
        )
        charts.append(over_step)
    if anatomy.modules:
        charts.append(modules_at_peak(anatomy.modules))
    if one.timing and one.timeline:
        charts.append(timeline(one.timeline, one.timing.step_seconds, one.job.words.turn))
    return charts


def draw_bars(
    title: str, groups: Sequence[BarGroup], series: Sequence[str], limit: float | None = None
) -> Chart:
    """Return a bar chart with a name for each group, and in each group one bar for each series."""
    return Chart(
        title=title, about=f"Bars: {title}.", drawing=Bars(series=series, groups=groups, limit=limit)
    )


def _of_prediction(one: Prediction) -> PageParts:
    software = "" if one.software == "installed" else f" · software {one.software}"
    recipe = f"recipe {one.recipe} · {one.loop} loop{software}"
    lines = [job_line(one.job), recipe, *(line.plain for line in prediction.about_pace(one))]
    title, tone = headlines.of_prediction(one)
    report = prediction.render(one, operators=True)
    figures = headlines.figures_of_prediction(one)
    return PageParts(title, lines, draw_prediction(one), report, one.doubts, figures, tone)


def _of_recipes(compared: RecipeComparison) -> PageParts:
    """Return the page for a comparison of recipes: their memory side by side, and each one's memory during
    the step.
    """
    several = compared.predictions
    groups = [BarGroup(str(one.recipe), [_size(one.needed_bytes)]) for one in several]
    charts = [draw_bars("GPU memory needed, by recipe", groups, [PREDICTED], several[0].memory_bytes)]
    timed = [(str(one.recipe), one.speed) for one in several]
    steps = [BarGroup(name, [_seconds(speed.step_seconds, speed)]) for name, speed in timed if speed]
    charts += (
        [draw_bars(f"Seconds of a {several[0].job.words.turn}, by recipe", steps, [PREDICTED])]
        if steps
        else []
    )
    for one in several:
        named = draw_prediction(one)[:1]
        charts += [replace(chart, title=f"{chart.title}: {one.recipe}") for chart in named]
    lines = [job_line(several[0].job), *(one.text for one in compare.answer(several, compared.best))]
    doubts = [*dict.fromkeys(doubt for one in several for doubt in one.doubts)]
    title, tone = headlines.of_recipes(compared)
    figures = headlines.figures_of_recipes(compared)
    return PageParts(title, lines, charts, compare.render(several), doubts, figures, tone)


def _of_plan(one: Plan) -> PageParts:
    lines = [plan.question(one), plan.answer(one), *plan.headroom(one)]
    title, tone = headlines.of_plan(one)
    figures = headlines.figures_of_plan(one)
    return PageParts(title, lines, [draw_front(one)], plan.render(one), one.doubts, figures, tone)


def _of_measurement(one: Measurement) -> PageParts:
    figures = ((name, getattr(one.footprint, figure, None)) for figure, name in compare.FIGURES.items())
    groups = [BarGroup(name, [_size(size)]) for name, size in figures if size is not None]
    title = f"Measured at the peak on {one.device.name}"
    charts = [draw_bars(title, groups, [MEASURED])] if groups else []
    if one.timing and one.timing.seconds:
        steps = [
            BarGroup(f"step {number}", [_seconds(took)]) for number, took in enumerate(one.timing.seconds, 1)
        ]
        charts.append(draw_bars("How long each step took", steps[:MOST_STEPS], [MEASURED]))
    lines = [job_line(one.job), f"recipe {one.recipe} · {one.loop} loop · {one.device.name}"]
    title, tone = headlines.of_measurement(one)
    numbers = headlines.figures_of_measurement(one)
    return PageParts(title, lines, charts, measurement.render(one), figures=numbers, tone=tone)


def _of_comparison(one: Comparison) -> PageParts:
    groups = [
        BarGroup(
            compare.FIGURES[line.figure],
            [_size(line.predicted), _size(line.measured)],
            f"{100 * line.error:+.1f} %",
        )
        for line in one.lines
    ]
    charts = [draw_bars("Bytes at the peak, predicted and measured", groups, BESIDE)]
    if pace := one.pace:
        both = [_seconds(pace.predicted, one.prediction.speed), _seconds(pace.measured)]
        step = BarGroup("a step", both, f"{100 * pace.error:+.1f} %")
        charts.append(draw_bars("Seconds, predicted and measured", [step], BESIDE))
    charts += draw_prediction(one.prediction)
    device = one.measurement.device.name
    recipe = f"recipe {one.prediction.recipe} · {one.prediction.loop} loop · {device}"
    lines = [job_line(one.prediction.job), recipe]
    title, tone = headlines.of_comparison(one)
    report, doubts = compare.beside(one), one.prediction.doubts
    figures = headlines.figures_of_comparison(one)
    return PageParts(title, lines, charts, report, doubts, figures, tone)


def _of_gpu_plans(several: GpuPlans) -> PageParts:
    sizes = [
        BarGroup(
            answer.key,
            [
                _size(answer.choice.needed_bytes),
                None if answer.gpu.memory_bytes is None else _size(answer.gpu.memory_bytes),
            ],
            "fits" if answer.fits else "does not fit",
        )
        for answer in several.answers
        if answer.choice
    ]
    charts = [draw_bars("GPU memory of the best recipe, by GPU", sizes, [PREDICTED, GPU_MEMORY])]
    timed = [(answer.key, several.speed(answer)) for answer in several.fitting]
    speeds = [BarGroup(key, [_samples(speed)]) for key, speed in timed if speed]
    if speeds:
        charts.append(
            draw_bars(f"{several.job.words.item.capitalize()} per second where it fits", speeds, [PREDICTED])
        )
    title, tone = headlines.of_gpu_plans(several)
    figures = headlines.figures_of_gpu_plans(several)
    report, doubts = gpu_plans.render(several), [*gpu_plans.doubts(several)]
    lines = [gpu_plans.question(several), *gpu_plans.headline(several, Prices())]
    return PageParts(title, lines, charts if sizes else [], report, doubts, figures, tone)


def _size(size: float) -> BarFigure:
    return BarFigure(size, show_bytes(int(size)))


def _seconds(seconds: float, speed: StepSpeed | None = None) -> BarFigure:
    """Return a bar for a number of seconds, with the range of a predicted speed."""
    if speed is None or speed.low_seconds is None or speed.high_seconds is None:
        return BarFigure(seconds, show_seconds(seconds))
    low, high = speed.low_seconds, speed.high_seconds
    label = f"{show_seconds(seconds)} ({show_seconds(low)} to {show_seconds(high)})"
    return BarFigure(seconds, label, low, high)


def _samples(speed: StepSpeed) -> BarFigure:
    low, high = speed.samples_range or (None, None)
    between = "" if low is None else f" ({low:,.1f} to {high:,.1f})"
    return BarFigure(speed.samples_per_second, f"{speed.samples_per_second:,.1f}{between}", low, high)


_PARTS: dict[type, Callable[[Any], PageParts]] = {
    Prediction: _of_prediction,
    RecipeComparison: _of_recipes,
    Plan: _of_plan,
    Measurement: _of_measurement,
    Comparison: _of_comparison,
    GpuPlans: _of_gpu_plans,
}
