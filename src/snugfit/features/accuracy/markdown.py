"""The Markdown page of `snugfit accuracy --show`: a summary, a histogram of prediction errors, and all
runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from snugfit.features.accuracy.compared_runs import BAND, Accuracy, ComparedRun, error_quantiles
from snugfit.features.accuracy.order import order_line, per_cent, seconds_cells
from snugfit.features.accuracy.ranking import group_by_job
from snugfit.features.accuracy.tables import (
    FIGURES,
    about_order,
    gaps_line,
    grids,
    job_words,
    summary_grid,
    title,
)
from snugfit.measurement.stopwatch import MAX_STABLE_SPREAD
from snugfit.report.text.grid import Grid, escape
from snugfit.results.measurement import HIGH_DISTURBANCE

EDGES = (-0.3, -0.2, -0.15, -0.1, -0.05, 0.0, 0.05, 0.1, 0.15, 0.2, 0.3)
"""Limits between the bars of the histogram of errors, as relative errors."""

COLUMNS = 50
"""Length of the histogram's longest bar, in characters."""

WORST = 10
"""Number of runs in the list of the largest errors."""

_HEAD = """# Accuracy

Written by `snugfit accuracy --show FOLDER --format markdown` from the files in that folder.

A seed draws models, jobs and recipes over {families} families; each is predicted, then measured in a process
of its own. All runs are shown. The largest allowed errors: {band}. Errors are
`predicted / measured - 1`, of the peak over the whole run and of the mean steady step. The
measurement of a run is described in `dev/measuring.md`, the prediction of seconds in `dev/seconds.md`.
"""


def document(results: Sequence[Accuracy]) -> str:
    """Return the accuracy results as one Markdown page."""
    band = ", ".join(f"{FIGURES[figure]} {100 * share:g} %" for figure, share in BAND.items())
    families = {run.family for result in results if result.kind == "drawn" for run in result.runs}
    parts = [_HEAD.format(band=band, families=len(families))]
    runs = [run for result in results for run in result.runs if run.seconds]
    if runs:
        parts += [_together(results), histogram(runs), worst_grid(runs).markdown()]
    for result in results:
        parts.append(f"## {escape(title(result))}\n")
        parts += [f"{escape(line)}\n" for line in _origin(result)]
        parts += [grid.markdown() for grid in grids(result)]
        parts += [f"{escape(line)}\n" for line in about_order(result)]
        parts += [_outside(result), summary_grid(result).markdown()]
    return "\n".join(part for part in parts if part)


def _together(results: Sequence[Accuracy]) -> str:
    """Return a few sentences that summarise the prediction errors of all results."""
    runs = [run for result in results for run in result.runs]
    errors = sorted(abs(run.error("step_seconds") or 0.0) for run in runs if run.seconds)
    median, nine, largest = (per_cent(error, digits=1, signed=False) for error in error_quantiles(errors))
    lines = [
        f"Seconds of a step over all {len(errors)} measured runs: half of the errors are below {median} %, "
        f"nine in ten below {nine} %. The largest is {largest} %."
    ]
    several = [run for result in results if result.kind != "drawn" for run in result.runs]
    lines += [line for line in [order_line(several)] if line]
    plans = [group for result in results if result.kind == "top" for group in group_by_job(result.runs)]
    return f"## All results together\n\n{escape(' '.join([*lines, *gaps_line(plans)]))}\n"


def histogram(runs: Sequence[ComparedRun]) -> str:
    """Return a histogram of the relative errors of predicted step times as text."""
    errors = [run.error("step_seconds") or 0.0 for run in runs]
    lower, upper = (None, *EDGES), (*EDGES, None)
    counts = [
        sum((low is None or error >= low) and (high is None or error < high) for error in errors)
        for low, high in zip(lower, upper, strict=True)
    ]
    lines = [
        f"{_range(low, high):>18}  {'█' * round(COLUMNS * count / max(counts)):<{COLUMNS}}  {count}".rstrip()
        for low, high, count in zip(lower, upper, counts, strict=True)
    ]
    return "### Errors of the seconds of a step\n\n```text\n" + "\n".join(lines) + "\n```\n"


def _range(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        edge, word = (high, "below") if low is None else (low, "from")
        return f"{word} {_edge(edge or 0.0)} %"
    return f"{_edge(low)} to {_edge(high)} %"


def _edge(share: float) -> str:
    return f"{100 * share:+g}" if share else "0"


def worst_grid(runs: Sequence[ComparedRun]) -> Grid:
    """Return a table of the runs with the largest errors of predicted step time, with their causes."""
    worst = sorted(runs, key=lambda run: -abs(run.error("step_seconds") or 0.0))[:WORST]
    rows = tuple(
        (job_words(run), str(run.recipe), *seconds_cells(run), run.bound or "", "; ".join(causes(run)))
        for run in worst
    )
    heads = ("Job", "Recipe", "ms a step>", "measured>", "%>", "bound by", "Cause, where known")
    return Grid(title="The largest errors of seconds", heads=heads, rows=rows)


def causes(run: ComparedRun) -> Iterator[str]:
    """Yield the causes of a run's prediction error: the recorded cause, and signs in the run's own values."""
    if run.cause:
        yield run.cause
    if run.contaminated:
        yield f"the GPU was shared: {run.contaminated}"
    if run.crowded:
        yield f"the host was crowded: {run.crowded}"
    if run.clock and run.clock.fall:
        yield f"the GPU lowered its clock: {run.clock.fall}"
    if run.disturbed and run.disturbed > HIGH_DISTURBANCE:
        yield f"other processes disturbed its core in {100 * run.disturbed:.0f} % of the samples"
    if run.spread is not None and run.spread > MAX_STABLE_SPREAD:
        yield f"its own steps vary by {100 * run.spread:.0f} %"
    yield from (doubt for doubt in run.doubts if doubt.startswith("Seconds"))


def _origin(result: Accuracy) -> Iterator[str]:
    """Yield sentences on the package versions and hardware rates of the predictions. They report if a
    prediction was made after the measurements.
    """
    yield f"Predicted with {_packages(result.versions)}{f'; rates {result.rates}' if result.rates else ''}."
    if result.rescored:
        yield (
            f"Predicted again {result.rescored}, after the runs were measured, so these are not forecasts. "
            f"The first predictions were made with {_packages(result.original_versions)}."
        )
    measured_with = {
        _packages({name: run.versions[name] for name in result.versions if name in run.versions})
        for run in result.runs
        if run.versions
    }
    for packages in sorted(measured_with - {_packages(result.versions)}):
        yield f"Measured with {packages}: an error may be a difference between the two."


def _packages(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _outside(result: Accuracy) -> str:
    lines = (f"- Run {run.number}: {' '.join((run.complaint or '').split())}\n" for run in result.outside)
    return "".join(lines)
