"""The page, plot and notebook output for each type of result, such as a prediction.

**Fronts.** The chart of a plan's Pareto front: memory against speed, one point for each recipe (its training
techniques).

**Bytes.** The chart of memory by category (such as activations) during a step, with its phases and micro-
batches.

**Modules and phases.** Charts of the memory by module at the peak, and of a step's phases on host and device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from typing import Any

from snugfit.comparison.compare import Comparison
from snugfit.comparison.recipes import RecipeComparison
from snugfit.feature_folders import feature_objects
from snugfit.features.page import headlines
from snugfit.features.page.chart import (
    BarFigure,
    BarGroup,
    Bars,
    Chart,
    Front,
    Layer,
    MemoryCurve,
    ModuleMap,
    PageParts,
    RecipePoint,
    Timeline,
)
from snugfit.features.page.colours import GPU_MEMORY, KINDS, MEASURED, PREDICTED
from snugfit.features.page.document import document
from snugfit.planning.fleet.gpu_plans import GpuPlans
from snugfit.planning.fleet.prices import Prices
from snugfit.planning.plan import Choice, Plan
from snugfit.report import compare, measurement, prediction
from snugfit.report.plan import gpu_plans, plan
from snugfit.report.text.job import job_line
from snugfit.report.text.passages import micro_batch_passages, phase_passages
from snugfit.results.footprint import Kind, Moment
from snugfit.results.measurement import Measurement
from snugfit.results.prediction import CurvePoint, ModuleLine, Prediction
from snugfit.results.speed import StepSpeed
from snugfit.results.step_seconds import PhaseSpan
from snugfit.units import show_bytes, show_mib, show_seconds
from snugfit.versions import versions

MOST_STEPS = 100
"""Largest number of timed steps in one picture."""

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


# ---- fronts ------------------------------------------------------------------------------------------------


def draw_front(plan: Plan) -> Chart:
    """Return the chart of the recipes on a plan's Pareto front, with the best one and the memory limit. The
    points have the numbers of the table.
    """
    front = plan.fitting_first
    speeds = [plan.speed(choice) for choice in front]
    points = [
        _recipe_point(plan, choice, number, speed)
        for number, (choice, speed) in enumerate(zip(front, speeds, strict=True), 1)
    ]
    words = plan.job.words
    unit = f"{words.item.capitalize()} per second" + (", start-up included" if plan.steps else "")
    return Chart(
        title="Memory and speed of the best recipes (Pareto front)",
        about=f"{len(front)} recipes, memory against speed.",
        drawing=Front(points=points, limit=plan.memory_bytes, item=words.item),
        heads=("No.>", "Recipe", "MiB>", f"{unit}>", f"A {words.turn}>", "Verdict"),
        rows=[
            (
                str(number),
                choice.recipe,
                show_mib(choice.needed_bytes),
                f"{speed:.2f}",
                show_seconds(choice.step_seconds),
                _verdict(plan, choice),
            )
            for number, (choice, speed) in enumerate(zip(front, speeds, strict=True), 1)
        ],
        note="Filled points fit, hollow ones do not. No recipe of the front is both slower and larger than "
        "another.",
        numbered=True,
    )


def _recipe_point(plan: Plan, choice: Choice, number: int, speed: float) -> RecipePoint:
    verdict = _verdict(plan, choice)
    return RecipePoint(
        number=number,
        recipe=choice.recipe,
        bytes=choice.needed_bytes,
        speed=speed,
        fits=plan.fitting(choice),
        best=choice == plan.best,
        label=", ".join(
            filter(None, (show_bytes(choice.needed_bytes), f"{speed:.2f} {plan.job.words.item}/s", verdict))
        ),
    )


def _verdict(plan: Plan, choice: Choice) -> str:
    if plan.best == choice:
        return "the best that fits"
    return "does not fit" if plan.memory_bytes and choice.needed_bytes > plan.memory_bytes else ""


# ---- bytes -------------------------------------------------------------------------------------------------


FURTHEST_LIMIT = 3.0
"""Largest ratio of the GPU's memory to the highest memory use at which the limit is drawn."""

NARROWEST_BATCH = 0.032
"""Smallest share of the step that a micro-batch must take for its number to be drawn."""


def memory_over_step(
    curve: Sequence[CurvePoint],
    *,
    context_bytes: int = 0,
    memory_bytes: int | None = None,
    micro_batches: int = 1,
    moment: Moment | None = None,
    turn: str = "step",
) -> Chart:
    """Return the chart of memory by category (such as activations) during a step, reserved memory, and the
    memory limit.

    `moment` is that of the whole run's peak. It names the curve's peak if both are in the same phase.
    `turn` is the noun for a step.
    """
    stacks = [{str(Kind.CONTEXT): context_bytes, **point.kinds} for point in curve]
    present = [str(kind) for kind in KINDS if any(stack.get(kind) for stack in stacks)]
    reserved = [context_bytes + point.reserved_bytes for point in curve]
    totals = [sum(stack.values()) for stack in stacks]
    peak = totals.index(max(totals))
    highest = max(*reserved, totals[peak])
    limit = memory_bytes if memory_bytes and memory_bytes <= FURTHEST_LIMIT * highest else None
    passage = curve[peak].phase
    inside = moment.module if moment and moment.step and moment.phase == passage else ""
    where = f"{passage}, {inside}" if inside else passage
    drawing = MemoryCurve(
        positions=[0.0, *(round(point.position, 5) for point in curve[1:])],
        layers=[Layer(kind=kind, bytes=[stack.get(kind, 0) for stack in stacks]) for kind in present],
        reserved=reserved,
        limit=limit,
        phases=phase_passages(curve),
        micro_batches=micro_batch_passages(curve, micro_batches, NARROWEST_BATCH),
        peak=peak,
        peak_label=f"Peak: {show_bytes(totals[peak])}, {where}",
    )
    batches = "Grey bands are backward passes; the numbers below are micro-batches."
    far = f"The memory limit, {show_bytes(memory_bytes or 0)}, is far above the top of this picture."
    return Chart(
        title=f"Memory through one {turn}",
        about=(
            f"Bytes by kind through one steady {turn}. The highest is {show_bytes(totals[peak])}, in {where}."
        ),
        drawing=drawing,
        heads=("Phase", "Highest MiB>", *(f"{kind}>" for kind in present), "Reserved>"),
        rows=[*_phase_rows(curve, stacks, present, context_bytes)],
        note=" ".join(
            [*([batches] if drawing.micro_batches else []), *([far] if memory_bytes and not limit else [])]
        ),
    )


def _phase_rows(
    curve: Sequence[CurvePoint], stacks: Sequence[Mapping[str, int]], present: Sequence[str], context: int
) -> Iterable[list[str]]:
    indexed = list(zip(curve, stacks, strict=True))
    for phase, members in groupby(indexed, key=lambda pair: pair[0].phase):
        at, stack = max(members, key=lambda pair: sum(pair[1].values()))
        kinds = (show_mib(stack.get(kind, 0)) for kind in present)
        yield [phase, show_mib(sum(stack.values())), *kinds, show_mib(context + at.reserved_bytes)]


# ---- modules and phases ------------------------------------------------------------------------------------


LOOP = "(the loop)"
"""Module name for tensors that no module allocated."""


def modules_at_peak(modules: Sequence[ModuleLine]) -> Chart:
    """Return the chart of the memory at the peak, by the module that allocated it and by category."""
    whole = sum(line.bytes for line in modules) or 1
    first = modules[0]
    return Chart(
        title=f"Bytes at the peak by module, {show_bytes(whole)} in all",
        about=(
            f"A map of {show_bytes(whole)} by module and kind. The largest area is {first.module or LOOP}: "
            f"{first.kind}, {show_bytes(first.bytes)}."
        ),
        drawing=ModuleMap(lines=modules),
        heads=("Module", "Kind", "MiB>", "Share>"),
        rows=[
            (
                line.module or LOOP,
                str(line.kind),
                show_mib(line.bytes),
                f"{100 * line.bytes / whole:.1f} %",
            )
            for line in modules
        ],
        note="A * means all layers of a stack. Tensors of the training loop have no module.",
    )


def timeline(spans: Sequence[PhaseSpan], step_seconds: float, turn: str = "step") -> Chart:
    """Return the chart of a steady step's phases in time: when the host launches them and when the device
    runs them.
    """
    return Chart(
        title=f"Host and GPU in one {turn}, {show_seconds(step_seconds)} from {turn} to {turn}",
        about=f"The times at which the host and the GPU work in one steady {turn}.",
        drawing=Timeline(spans=spans, end_seconds=max([step_seconds, *(span.end_seconds for span in spans)])),
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
        note="The host launches kernels before the GPU runs them, also those of the next step; when about "
        "1,000 are waiting, it waits too.",
    )
