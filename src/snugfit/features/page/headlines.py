"""The headline of a command's result in everyday words, and the large numbers below it."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from snugfit.comparison.compare import Comparison
from snugfit.comparison.recipes import RecipeComparison
from snugfit.features.page.chart import Figure
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.job.phases import PhaseWords
from snugfit.planning.fleet.gpu_plans import GpuPlans
from snugfit.planning.plan import Plan
from snugfit.report import short
from snugfit.report.plan import short as short_plan
from snugfit.report.text.answer import subject
from snugfit.report.text.pace import show_rate, show_spread, show_tokens
from snugfit.report.text.page import Sentence
from snugfit.results.measurement import Measurement
from snugfit.results.prediction import Prediction
from snugfit.results.speed import StepSpeed, speed_of
from snugfit.techniques.recipe import Recipe
from snugfit.units import show_bytes, show_seconds

EXACT = 0.005
"""Relative error below which a prediction counts as equal to its measurement."""


class Headline(NamedTuple):
    """The headline of a page, and its colour class: `good`, `tight`, `bad`, or empty."""

    title: str
    tone: str = ""


def of_prediction(one: Prediction) -> Headline:
    """Return the headline for a prediction: it states if the step fits, as in the short report."""
    about = subject(one.job, one.recipe, one.gpu, one.gpus, memory=one.memory_bytes)
    return _of_verdict(short.verdict(one), about, one.job, _place(one.gpu, one.gpus))


def of_plan(plan: Plan) -> Headline:
    """Return the headline for a plan: it states if a recipe fits, as in the short report."""
    recipe = Recipe.parse(plan.best_or_nearest.recipe)
    about = subject(plan.job, recipe, plan.gpu, memory=plan.memory_bytes)
    return _of_verdict(short_plan.verdict(plan), about, plan.job, _place(plan.gpu, 1))


def _of_verdict(verdict: Sentence, about: str, job: Job, gpu_phrase: str) -> Headline:
    """Return a verdict of the short report as a sentence on the model and a GPU: `BERT fits on the T4`.

    `about` is the subject of the verdict, with all sizes of the job. A page shows them below the headline.
    `gpu_phrase` names the GPU: `the T4`.
    """
    fit, model = verdict.text.removeprefix(f"{about}: "), _model(job)
    verb = next((verb for verb in ("does not fit", "fits") if fit.startswith(verb)), "")
    title = f"{model} {verb} on {gpu_phrase}{fit.removeprefix(verb)}" if verb else f"{model} {fit}"
    if fit.startswith("no recipe fits"):
        title = fit.replace("no recipe fits", f"No recipe fits {model} on {gpu_phrase}", 1)
    return Headline(title, "" if verdict.role == "heading" else verdict.role)


def of_measurement(one: Measurement) -> Headline:
    """Return the headline for a measurement: a sentence on its outcome and its peak memory."""
    name, size = _model(one.job), measured_bytes(one)
    if not one.ok:
        return Headline(f"{name} did not run to its end on {one.device.name}: {one.outcome}", "bad")
    took = f"took {show_bytes(size)} at the peak" if size else "ran"
    return Headline(f"{name} {took} on {one.device.name}")


def of_comparison(one: Comparison) -> Headline:
    """Return the headline for a prediction next to its measurement: a sentence on the error of the predicted
    memory.
    """
    error = next(
        (e for figure in ("nvml_bytes", "reserved_bytes") if (e := one.error(figure)) is not None), None
    )
    error = one.worst.error if error is None and one.worst else error or 0.0
    name = f"{_model(one.prediction.job)} on {one.measurement.device.name.removeprefix('NVIDIA ')}"
    if abs(error) < EXACT:
        return Headline(f"The predicted memory of {name} agrees with the measured")
    return Headline(
        f"The predicted memory of {name} is {100 * abs(error):.1f} % too {'high' if error > 0 else 'low'}"
    )


def of_recipes(compared: RecipeComparison) -> Headline:
    """Return the headline for a comparison of recipes: a sentence on how many of them fit into memory."""
    several = compared.predictions
    name, where = _model(several[0].job), _place(several[0].gpu, several[0].gpus)
    fitting = sum(one.fits is True for one in several)
    if several[0].memory_bytes is None:
        return Headline(f"{name} under {len(several)} recipes")
    count = "No recipe" if not fitting else f"{fitting} of {len(several)} recipes"
    verb = "fits" if fitting < 2 else "fit"
    return Headline(f"{count} {verb} {name} on {where}", "good" if fitting else "bad")


def of_gpu_plans(several: GpuPlans) -> Headline:
    """Return the headline for plans on many GPUs: a sentence on the number of GPUs on which a recipe fits."""
    fitting, whole = len(several.fitting), len(several.answers)
    count = f"{fitting} of {whole} GPUs" if fitting else "None of these GPUs"
    return Headline(
        f"{count} can {several.job.words.verb} {_model(several.job)}", "good" if fitting else "bad"
    )


def figures_of_prediction(one: Prediction) -> list[Figure]:
    """Return the large numbers of a prediction's page: memory, free memory, step time and samples per
    second.
    """
    tone = of_prediction(one).tone
    per_gpu = ", on each GPU" if one.gpus > 1 else ""
    return [
        *_memory(one.needed_bytes, one.memory_bytes, tone, f"predicted{per_gpu}", one.headroom_bytes),
        *_speed(one.speed, one.job.words),
    ]


def figures_of_plan(plan: Plan) -> list[Figure]:
    """Return the large numbers of a plan's page, for the best recipe or the nearest to fitting. They are
    memory, free memory, step time and throughput.
    """
    shown = plan.best_or_nearest
    source = "predicted" if plan.best else "predicted, of the nearest miss"
    memory = _memory(shown.needed_bytes, plan.memory_bytes, of_plan(plan).tone, source, plan.headroom_bytes)
    return [*memory, *_speed(plan.timed(shown), plan.job.words)]


def figures_of_recipes(compared: RecipeComparison) -> list[Figure]:
    """Return the large numbers of a comparison's page: the least memory of all recipes, and the fastest step
    of those that fit.
    """
    smallest = min(compared.predictions, key=attrgetter("needed_bytes"))
    figures = [Figure("Least memory", show_bytes(smallest.needed_bytes), f"predicted, {smallest.recipe}")]
    if (best := compared.best) and (speed := best.speed):
        words = best.job.words
        samples = f"{show_rate(speed, words)} {words.rate}/s"
        figures += [
            Figure(f"Fastest {words.turn}", show_seconds(speed.step_seconds), f"estimate, {best.recipe}"),
            Figure("Speed", samples, "estimate, of the fastest"),
        ]
    return figures


def figures_of_gpu_plans(several: GpuPlans) -> list[Figure]:
    """Return the smallest and the fastest GPU on which a recipe fits."""
    figures, words = [], several.job.words
    if (smallest := several.smallest) and smallest.choice:
        figures.append(
            Figure("Smallest GPU", smallest.key, f"needs {show_bytes(smallest.choice.needed_bytes)}")
        )
    if (fastest := several.fastest) and (speed := several.speed(fastest)):
        figures.append(
            Figure("Fastest GPU", fastest.key, f"estimate, {show_rate(speed, words)} {words.rate}/s")
        )
    return figures


def figures_of_measurement(one: Measurement) -> list[Figure]:
    """Return the large numbers of a measurement's page: memory, free memory, step time and samples per
    second.
    """
    size, whole = measured_bytes(one), one.device.total_bytes
    figures = _memory(size, whole, "", "measured", 0) if size and whole else []
    if timing := one.timing:
        words = one.job.words
        rate = show_rate(speed_of(timing.step_seconds, one.job, measured_rates=True), words)
        figures += [
            Figure(
                f"Time per {words.turn}",
                show_seconds(timing.step_seconds),
                f"measured, {timing.steps:,} {words.turns}",
            ),
            Figure("Speed", f"{rate} {words.rate}/s", "measured"),
        ]
    return figures


def figures_of_comparison(one: Comparison) -> list[Figure]:
    """Return the large numbers of a page: predicted and measured memory, and predicted and measured step
    time.
    """
    known = {line.figure: line for line in one.lines}
    figures = []
    if line := known.get("nvml_bytes", known.get("reserved_bytes", one.worst)):
        figures += [
            Figure("Memory, predicted", show_bytes(int(line.predicted)), _error(line.error)),
            Figure("Memory, measured", show_bytes(int(line.measured)), "at the peak"),
        ]
    if pace := one.pace:
        turn = one.prediction.job.words.turn.capitalize()
        figures += [
            Figure(f"{turn}, predicted", show_seconds(pace.predicted), _error(pace.error)),
            Figure(f"{turn}, measured", show_seconds(pace.measured), "mean of the steady ones"),
        ]
    return figures


def _error(error: float) -> str:
    """Return a relative error as text: `11.6 % below the measured`."""
    if abs(error) < 0.0005:
        return "as measured"
    return f"{100 * abs(error):.1f} % {'below' if error < 0 else 'above'} the measured"


def measured_bytes(one: Measurement) -> int | None:
    """Return the measured peak memory by NVML, or else by PyTorch's allocator; None without a measurement."""
    footprint = one.footprint
    sizes = (footprint.nvml_bytes, footprint.reserved_bytes, footprint.requested_bytes) if footprint else ()
    return next((size for size in sizes if size), None)


def _model(job: Job) -> str:
    """Return the model's name without its organisation or folder."""
    return job.model.name.rstrip("/").rpartition("/")[2] or job.model.name


def _place(gpu: Gpu | None, gpus: int) -> str:
    """Return the GPU as a phrase in a sentence: `the RTX 4090`, or `each of 2 × H200`."""
    name = gpu.name.removeprefix("NVIDIA ").removeprefix("GeForce ") if gpu else "a GPU with this memory"
    if gpus > 1:
        return f"each of {gpus} × {name}" if gpu else f"each of {gpus} GPUs"
    return f"the {name}" if gpu else name


def _memory(needed: int, limit: int | None, tone: str, source: str, headroom: int) -> list[Figure]:
    if limit is None:
        return [
            Figure("GPU memory", show_bytes(needed), source),
            Figure("Spare", "-", "add --gpu or --memory"),
        ]
    spare = limit - needed
    reserve = f"{show_bytes(headroom)} should stay free" if headroom else "up to the memory limit"
    return [
        Figure("GPU memory", show_bytes(needed), f"of {show_bytes(limit)}, {source}", needed / limit, tone),
        Figure("Spare", show_bytes(spare), reserve, tone=tone)
        if spare >= 0
        else Figure("Missing", show_bytes(-spare), "above the memory limit", tone=tone),
    ]


def _speed(speed: StepSpeed | None, words: PhaseWords) -> list[Figure]:
    if speed is None or not speed.step_seconds:
        return [Figure(f"Time per {words.turn}", "-", "not predicted: it needs a GPU with known rates")]
    spread = show_spread(speed)
    tokens = speed.tokens_per_second
    return [
        Figure(
            f"Time per {words.turn}",
            show_seconds(speed.step_seconds),
            f"estimate{f', {spread}' if spread else ''}",
        ),
        Figure(
            "Speed",
            f"{speed.samples_per_second:,.1f} {words.item}/s",
            f"estimate{f', {show_tokens(tokens)} tokens/s' if tokens else ''}",
        ),
    ]
