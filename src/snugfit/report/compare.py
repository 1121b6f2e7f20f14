"""Predictions side by side, and a prediction next to its measurement.

Every difference is shown in bytes and in per cent. Per cent show if it matters, bytes if it is enough.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from snugfit.comparison.compare import Comparison
from snugfit.report.plan.ways_out import of_prediction
from snugfit.report.text.job import beside_note, job_line, recipes_beside
from snugfit.report.text.pace import show_mfu, show_spread, show_tokens
from snugfit.report.text.table import PlainTable, table
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


def render(predictions: Sequence[Prediction]) -> RenderableType:
    """Return the table of recipes for one job; differences are to the first recipe."""
    first = predictions[0]
    where = first.gpu.name if first.gpu else "no GPU named"
    head = words(f"{job_line(first.job)} · {first.loop} loop · {where}", "bold")
    doubts = dict.fromkeys(doubt for prediction in predictions for doubt in prediction.doubts)
    return Group(
        head,
        _totals(predictions),
        _kinds(predictions),
        *(words(f"Uncertain: {doubt}") for doubt in doubts),
        *map(words, of_prediction(first)),
    )


def _totals(predictions: Sequence[Prediction]) -> Group:
    base = predictions[0].needed_bytes
    recipes = [str(prediction.recipe) for prediction in predictions]
    shown = recipes_beside(recipes, recipes[0])
    timed = any(prediction.timing for prediction in predictions)
    rows = [
        (
            number,
            show_mib(prediction.needed_bytes),
            *_difference(prediction.needed_bytes, base),
            _fits(prediction),
            *(_pace(prediction) if timed else ()),
            str(prediction.footprint.at or ""),
            recipe,
        )
        for number, (prediction, recipe) in enumerate(zip(predictions, shown, strict=True), start=1)
    ]
    heads = ("", "MiB>", "Difference MiB>", "%>", "Fits", *(_PACE if timed else ()), "Peak", "Recipe<")
    return Group(table(heads, rows), words(beside_note(shown)))


_PACE = ("ms a step>", "likely>", "samples/s>", "tokens/s>", "MFU>")


def _pace(prediction: Prediction) -> tuple[str, ...]:
    """Return the cells of `_PACE`; empty ones where seconds are not predicted."""
    speed = prediction.speed
    if speed is None:
        return ("",) * len(_PACE)
    return (
        f"{1e3 * speed.step_seconds:,.1f}",
        show_spread(speed),
        f"{speed.samples_per_second:,.1f}",
        show_tokens(speed.tokens_per_second),
        show_mfu(speed.mfu),
    )


def _kinds(predictions: Sequence[Prediction]) -> PlainTable:
    """Return the bytes of each kind at the recipes' own peaks, the source of their difference."""
    names = list(dict.fromkeys(line.kind for prediction in predictions for line in prediction.anatomy.kinds))
    per_recipe = [{line.kind: line.bytes for line in prediction.anatomy.kinds} for prediction in predictions]
    rows = [(name, *(show_mib(kinds.get(name, 0)) for kinds in per_recipe)) for name in names]
    heads = [f"{number}>" for number in range(1, len(predictions) + 1)]
    return table(("MiB at the peak, by recipe", *heads), rows)


def _difference(size: int, base: int) -> tuple[str, str]:
    return (f"{'+' if size > base else ''}{show_mib(size - base)}", show_per_cent(size, base))


def _fits(prediction: Prediction) -> Text:
    spare = prediction.spare_bytes
    if spare is None:
        return words("?")
    if prediction.tight:
        return words(f"tight, {show_bytes(spare)} spare", "yellow")
    return (
        words(f"yes, {show_bytes(spare)} spare", "green")
        if spare >= 0
        else words(f"no, {show_bytes(-spare)} over", "red")
    )


def beside(comparison: Comparison) -> RenderableType:
    """Return a prediction next to its measurement, with the errors."""
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
    what = f"{job_line(comparison.prediction.job)} · {comparison.prediction.recipe}"
    bytes_table = table(heads, rows, title=f"{what} · {comparison.measurement.device.name}")
    pace = comparison.pace
    if pace is None:
        return bytes_table
    figures = f"{show_seconds(pace.predicted)} predicted, {show_seconds(pace.measured)} measured"
    return Group(bytes_table, words(f"A step: {figures} ({100 * pace.error:+.1f} %)."))
