"""The pictures of each kind of result, and the page that shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import RenderableType

from snugfit.comparison.compare import Comparison
from snugfit.comparison.recipes import RecipeComparison
from snugfit.planning.fleet.gpu_plans import GpuPlans
from snugfit.planning.fleet.prices import Prices
from snugfit.planning.plan import Plan
from snugfit.report import compare, measurement, prediction
from snugfit.report.page.bars import BarGroup, bars, timeline
from snugfit.report.page.memory import memory_over_step
from snugfit.report.page.modules import modules_at_peak
from snugfit.report.page.picture import Picture, document, fragment
from snugfit.report.page.plot import plot
from snugfit.report.plan import gpu_plans, plan
from snugfit.report.plan.front import draw_front
from snugfit.report.short import verdict
from snugfit.report.text.files import write_atomically
from snugfit.report.text.job import job_line
from snugfit.report.text.terminal import as_text
from snugfit.results.measurement import Measurement
from snugfit.results.prediction import Prediction
from snugfit.results.speed import StepSpeed
from snugfit.units import show_bytes, show_seconds

REPORT_WIDTH = 120
"""Columns of the text report on a page."""

MOST_STEPS = 100
"""Largest number of timed steps in a picture."""

ALLOWED = "the memory limit"

BESIDE = ("predicted", "measured")


class PageParts(NamedTuple):
    """The parts of a result on a page or in a notebook's cell."""

    title: str
    lines: Sequence[str]
    """The answer in sentences."""
    pictures: Sequence[Picture]
    report: RenderableType
    """The whole result in words and tables."""
    doubts: Iterable[str] = ()
    """Sentences on the uncertain parts of the result."""


def write_page(path: Path, result: object) -> None:
    """Write the pictures of a result, with its whole report as text, as one self-contained page."""
    write_atomically(path, _html(document, result).encode("utf-8"))


def draw_plot(path: Path, result: object) -> None:
    """Draw the answer and its pictures as one `.png` or `.svg` file."""
    write_atomically(path, plot_bytes(result, path.suffix[1:]))


def plot_bytes(result: object, form: str) -> bytes:
    """Return the answer and its pictures as a `png` or an `svg` file."""
    parts = parts_of(result)
    return plot(parts.title, parts.lines, parts.pictures, _uncertain(parts), form)


def notebook_cell(result: object) -> str:
    """Return the pictures and tables of a result as an inert HTML fragment."""
    return _html(fragment, result)


def _html(shape: Callable[..., str], result: object) -> str:
    parts = parts_of(result)
    report = as_text(parts.report, width=REPORT_WIDTH)
    return shape(parts.title, parts.lines, parts.pictures, _uncertain(parts), report=report)


def _uncertain(parts: PageParts) -> list[str]:
    return [f"Uncertain: {doubt}" for doubt in parts.doubts]


def has_pictures(kind: type) -> bool:
    """Return True for a type of results with pictures."""
    return kind in _PARTS


def parts_of(result: object) -> PageParts:
    """Return the page of this result. A feature passes the parts themselves."""
    return result if isinstance(result, PageParts) else _PARTS[type(result)](result)


def draw_prediction(one: Prediction) -> list[Picture]:
    """Return bytes through the step, bytes by module, and the step's timeline, as far as they are
    predicted."""
    anatomy, pictures = one.anatomy, []
    if anatomy.curve and anatomy.curve[0].kinds:
        over_step = memory_over_step(
            anatomy.curve,
            context_bytes=one.footprint.context_bytes or 0,
            memory_bytes=one.memory_bytes,
            micro_batches=one.recipe.setup().micro_batches,
        )
        pictures.append(over_step)
    if anatomy.modules:
        pictures.append(modules_at_peak(anatomy.modules))
    if one.timing and one.timeline:
        pictures.append(timeline(one.timeline, one.timing.step_seconds))
    return pictures


def _of_prediction(one: Prediction) -> PageParts:
    recipe = f"recipe {one.recipe} · {prediction.heading(one).plain.splitlines()[-1]}"
    lines = [verdict(one).text, *(line.plain for line in prediction.about_pace(one)), recipe]
    report = prediction.render(one, operators=True)
    return PageParts(job_line(one.job), lines, draw_prediction(one), report, one.doubts)


def _of_recipes(compared: RecipeComparison) -> PageParts:
    """Return each recipe's need side by side, and the bytes through the step of each."""
    several = compared.predictions
    memory = several[0].memory_bytes
    groups = [BarGroup(str(one.recipe), [one.needed_bytes]) for one in several]
    title = "GPU memory needed, by recipe"
    pictures = [bars(title, groups, ["needed"], _show, bound=memory, bound_words=ALLOWED)]
    timed = [(str(one.recipe), one.speed) for one in several]
    steps = [BarGroup(name, [it.step_seconds], "", [_seconds_range(it)]) for name, it in timed if it]
    pictures += [bars("Seconds of a step, by recipe", steps, ["seconds"], show_seconds)] if steps else []
    for one in several:
        named = draw_prediction(one)[:1]
        pictures += [replace(picture, title=f"{picture.title}: {one.recipe}") for picture in named]
    lines = [sentence.text for sentence in compare.answer(several, compared.best)]
    doubts = dict.fromkeys(doubt for one in several for doubt in one.doubts)
    return PageParts(job_line(several[0].job), lines, pictures, compare.render(several), doubts)


def _of_plan(one: Plan) -> PageParts:
    lines = [plan.answer(one), *plan.headroom(one)]
    return PageParts(plan.question(one), lines, [draw_front(one)], plan.render(one), one.doubts)


def _of_measurement(one: Measurement) -> PageParts:
    figures = ((name, getattr(one.footprint, figure, None)) for figure, name in compare.FIGURES.items())
    known = [(name, size) for name, size in figures if size is not None]
    groups = [BarGroup(name, [size]) for name, size in known]
    title = f"Measured at the peak on {one.device.name}"
    pictures = [bars(title, groups, ["measured"], _show)] if groups else []
    if one.timing and one.timing.seconds:
        steps = [BarGroup(f"step {number}", [took]) for number, took in enumerate(one.timing.seconds, 1)]
        pictures.append(bars("How long each step took", steps[:MOST_STEPS], ["seconds"], show_seconds))
    lines = [f"recipe {one.recipe} · {one.loop} loop · {one.device.name}"]
    if not one.ok:
        lines = [f"The run ended with {one.outcome}.", *lines]
    elif known and one.timing:
        size = _show(max(size for _, size in known))
        speed = f"{show_seconds(one.timing.step_seconds)}, {one.timing.samples_per_second:,.1f} samples/s"
        lines = [f"{size} at the peak; a step takes {speed}.", *lines]
    return PageParts(job_line(one.job), lines, pictures, measurement.render(one))


def _of_comparison(one: Comparison) -> PageParts:
    groups = [
        BarGroup(compare.FIGURES[line.figure], [line.predicted, line.measured], f"{100 * line.error:+.1f} %")
        for line in one.lines
    ]
    pictures = [bars("Bytes at the peak, predicted and measured", groups, BESIDE, _show)]
    if pace := one.pace:
        ranges = [_seconds_range(one.prediction.speed), None]
        step = BarGroup("a step", [pace.predicted, pace.measured], f"{100 * pace.error:+.1f} %", ranges)
        pictures.append(bars("Seconds, predicted and measured", [step], BESIDE, show_seconds))
    lines = [f"recipe {one.prediction.recipe} · {one.prediction.loop} loop · {one.measurement.device.name}"]
    known = {line.figure: line for line in one.lines}
    if shown := known.get("nvml_bytes", known.get("reserved_bytes", one.worst)):
        where = f"{compare.FIGURES[shown.figure]} at the peak ({100 * shown.error:+.1f} %)"
        lines = [f"{_show(shown.predicted)} predicted, {_show(shown.measured)} measured {where}.", *lines]
    pictures += draw_prediction(one.prediction)
    return PageParts(
        job_line(one.prediction.job), lines, pictures, compare.beside(one), one.prediction.doubts
    )


def _of_gpu_plans(several: GpuPlans) -> PageParts:
    known = [answer for answer in several.answers if answer.choice]
    sizes = [
        BarGroup(
            answer.key,
            [answer.choice.needed_bytes if answer.choice else None, answer.gpu.memory_bytes],
            "fits" if answer.fits else "does not fit",
        )
        for answer in known
    ]
    timed = [(answer.key, several.speed(answer)) for answer in several.fitting]
    speeds = [
        BarGroup(key, [speed.samples_per_second], "", [speed.samples_range]) for key, speed in timed if speed
    ]
    pictures = [bars("GPU memory of the best recipe, by GPU", sizes, ["needed", "the GPU's memory"], _show)]
    if speeds:
        pictures.append(bars("Samples per second where it fits", speeds, ["samples/s"], "{:,.1f}".format))
    lines = [*gpu_plans.headline(several, Prices())]
    report, doubts = gpu_plans.render(several), gpu_plans.doubts(several)
    return PageParts(gpu_plans.question(several), lines, pictures if known else [], report, doubts)


def _seconds_range(speed: StepSpeed | None) -> tuple[float, float] | None:
    if speed is None or speed.low_seconds is None or speed.high_seconds is None:
        return None
    return speed.low_seconds, speed.high_seconds


def _show(size: float) -> str:
    return show_bytes(int(size))


_PARTS: dict[type, Callable[[Any], PageParts]] = {
    Prediction: _of_prediction,
    RecipeComparison: _of_recipes,
    Plan: _of_plan,
    Measurement: _of_measurement,
    Comparison: _of_comparison,
    GpuPlans: _of_gpu_plans,
}
