"""Predictions side by side, and a prediction next to its measurement.

Every difference is shown in bytes and in per cent. Per cent show if a difference matters, bytes if it decides
the fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter

from rich.console import Group, RenderableType

from snugfit.comparison.compare import Comparison
from snugfit.comparison.recipes import RecipeComparison
from snugfit.report.plan.ways_out import of_prediction
from snugfit.report.short import verdict, widest
from snugfit.report.text.answer import subject, uncertain
from snugfit.report.text.grid import Grid
from snugfit.report.text.job import job_line
from snugfit.report.text.pace import show_mfu, show_rate, show_spread, show_tokens
from snugfit.report.text.page import Page, Sentence, with_commands
from snugfit.report.text.table import table
from snugfit.report.text.terminal import words
from snugfit.results.prediction import Prediction
from snugfit.units import show_bytes, show_mib, show_per_cent, show_seconds

FIGURES = {
    "requested_bytes": "requested",
    "allocated_bytes": "allocated",
    "reserved_bytes": "reserved",
    "nvml_bytes": "on the GPU",
    "context_bytes": "CUDA context",
}


def render(predictions: Sequence[Prediction], *, details: bool = True) -> Page:
    """Return the report of several recipes: the best recipe and a table of all. `details` adds bytes by
    category and every warning.
    """
    best = RecipeComparison(tuple(predictions)).best
    doubts = [*dict.fromkeys(doubt for prediction in predictions for doubt in prediction.doubts)]
    whole: list[Sentence | Grid] = [
        _kinds(predictions),
        *(Sentence(f"Uncertain: {doubt}", "uncertain") for doubt in doubts),
    ]
    return Page(
        answer(predictions, best),
        [_totals(predictions, best, details=details)],
        with_commands(of_prediction(predictions[0])),
        whole if details else uncertain(doubts, widest(predictions[0])),
    )


def answer(predictions: Sequence[Prediction], best: Prediction | None) -> Iterator[Sentence]:
    """Yield sentences with the best recipe and its fit. If none fits, they name the recipe that needs the
    least memory.
    """
    first = predictions[0]
    about = f"{subject(first.job, None, first.gpu, first.gpus, memory=first.memory_bytes)}:"
    if best is None:
        nearest = min(predictions, key=lambda prediction: prediction.needed_bytes)
        yield Sentence(f"{about} no recipe fits. The smallest is short by {_missing(nearest)}.", "bad")
        return
    of = "that fit" if best.fits else "compared"
    aim = "fastest" if best.timing else "smallest"
    number = (
        len(predictions) if best.fits is None else sum(prediction.fits is True for prediction in predictions)
    )
    fit = verdict(best)
    aim_text = f"{aim} of {number} recipes {of}" if number > 1 else "only recipe that fits"
    figures = f": {fit.text.partition(': ')[2]}"
    figures = figures if best.tight else figures.replace(": fits, ", ", ")
    yield Sentence(f"{about} the {aim_text}{figures}", fit.role)
    yield Sentence(str(best.recipe), "recipe")


def _totals(predictions: Sequence[Prediction], best: Prediction | None, *, details: bool) -> Grid:
    base = predictions[0].needed_bytes
    timed = any(prediction.timing for prediction in predictions)
    words = predictions[0].job.words
    # The short report has only seconds, one throughput, and MFU.
    columns = itemgetter(0, 1, 2, 3, 4) if details else itemgetter(0, 5, 4)
    pace = columns(
        (f"ms a {words.turn}>", "likely>", f"{words.item}/s>", "tokens/s>", "MFU>", f"{words.rate}/s>")
    )
    rows = tuple(
        (
            str(prediction.recipe),
            ("best" if best.fits else "smallest") if prediction is best else _fit(prediction),
            show_mib(prediction.needed_bytes),
            *_difference(prediction.needed_bytes, base),
            *(columns(_pace(prediction)) if timed else ()),
            *((str(prediction.footprint.at or ""),) if details else ()),
        )
        for prediction in predictions
    )
    heads = ("Recipe<", "Fits", "MiB>", "Difference MiB>", "%>", *(pace if timed else ()))
    return Grid(title="", heads=(*heads, "Peak") if details else heads, rows=rows)


def _pace(prediction: Prediction) -> tuple[str, ...]:
    """Return seconds per step and throughput of a prediction as six table cells; empty cells if they are not
    predicted.
    """
    speed = prediction.speed
    if speed is None:
        return ("",) * 6
    return (
        f"{1e3 * speed.step_seconds:,.1f}",
        show_spread(speed),
        f"{speed.samples_per_second:,.1f}",
        show_tokens(speed.tokens_per_second),
        show_mfu(speed.mfu),
        show_rate(speed, prediction.job.words),
    )


def _kinds(predictions: Sequence[Prediction]) -> Grid:
    """Return a table of each recipe's bytes by category (weights, activations, ...) at its own peak, which
    explains their difference.
    """
    names = list(dict.fromkeys(line.kind for prediction in predictions for line in prediction.anatomy.kinds))
    per_recipe = [{line.kind: line.bytes for line in prediction.anatomy.kinds} for prediction in predictions]
    rows = tuple(
        (str(prediction.recipe), *(show_mib(kinds.get(name, 0)) for name in names))
        for prediction, kinds in zip(predictions, per_recipe, strict=True)
    )
    return Grid(
        title="MiB at the peak, by kind", heads=("Recipe<", *(f"{name}>" for name in names)), rows=rows
    )


def _difference(size: int, base: int) -> tuple[str, str]:
    return (f"{'+' if size > base else ''}{show_mib(size - base)}", show_per_cent(size, base))


def _fit(prediction: Prediction) -> str:
    spare = prediction.spare_bytes
    if spare is None:
        return "?"
    if spare < 0:
        return f"no, short by {_missing(prediction)}"
    return f"tight, {show_bytes(spare)} free" if prediction.tight else f"yes, {show_bytes(spare)} free"


def _missing(prediction: Prediction) -> str:
    return show_bytes(-(prediction.spare_bytes or 0))


def beside(comparison: Comparison) -> RenderableType:
    """Return a report that lists predicted and measured bytes and seconds in columns, with errors."""
    rows = [
        (
            FIGURES[line.figure],
            show_mib(int(line.predicted)),
            show_mib(int(line.measured)),
            *_difference(int(line.predicted), int(line.measured)),
        )
        for line in comparison.lines
    ]
    heads = ("At the peak", "Predicted MiB>", "Measured MiB>", "Error MiB>", "%>")
    title = f"{job_line(comparison.prediction.job)} · {comparison.prediction.recipe}"
    bytes_table = table(heads, rows, title=f"{title} · {comparison.measurement.device.name}")
    pace = comparison.pace
    if pace is None:
        return bytes_table
    figures = f"{show_seconds(pace.predicted)} predicted, {show_seconds(pace.measured)} measured"
    return Group(
        bytes_table,
        words(f"A {comparison.prediction.job.words.turn}: {figures} ({100 * pace.error:+.1f} %)."),
    )
