"""Table of a job's recipes with predicted and measured values, their order, and the slowdown of the predicted
best.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from snugfit.features.accuracy.compared_runs import ComparedRun
from snugfit.features.accuracy.ranking import APART, gap, pooled_agreement
from snugfit.report.text.grid import Grid
from snugfit.units import show_mib

BYTES = ("allocated_bytes", "reserved_bytes", "nvml_bytes")
HEADS = (
    "No.", "NVML MiB>", "measured>", "allocated %>", "reserved %>", "NVML %>", "ms a step>", "measured>",
    "%>", "rank>", "measured>", "Recipe<",
)  # fmt: skip


def recipes_grid(runs: Sequence[ComparedRun], title: str, note: str = "") -> Grid:
    """Return a table with one row for each recipe. Errors are the shares by which predictions are too high;
    ranks are those of seconds."""
    predicted = _ranks((run.number, run.predicted_step_seconds) for run in runs)
    measured = _ranks((run.number, run.step_seconds) for run in runs if run.outcome == "ok")
    rows = tuple(
        (
            str(run.number),
            *bytes_cells(run),
            *seconds_cells(run),
            predicted.get(run.number, ""),
            measured.get(run.number, ""),
            str(run.recipe),
        )
        for run in runs
    )
    return Grid(title=title, heads=HEADS, rows=rows, note=note)


def bytes_cells(run: ComparedRun) -> Iterator[str]:
    """Yield table cells: predicted and measured NVML MiB (or the run's cause of death), and the errors of all
    bytes in per cent."""
    yield _mib(run.predicted.nvml_bytes if run.predicted else None)
    if run.outcome not in (None, "ok"):
        yield str(run.outcome)
    else:
        yield _mib(run.measured.nvml_bytes if run.measured else None)
    yield from (per_cent(run.error(figure)) for figure in BYTES)


def seconds_cells(run: ComparedRun) -> Iterator[str]:
    """Yield table cells: predicted and measured milliseconds of a step, and the error in per cent."""
    for seconds in (run.predicted_step_seconds, run.step_seconds if run.outcome == "ok" else None):
        yield "" if seconds is None else f"{seconds * 1e3:,.1f}"
    yield per_cent(run.error("step_seconds"), digits=1)


def per_cent(share: float | None, *, digits: int = 2, signed: bool = True) -> str:
    """Return a fraction as per cent, `+0.12`; empty for None."""
    if share is None:
        return ""
    return f"{100 * share:+.{digits}f}" if signed else f"{100 * share:.{digits}f}"


def order_line(runs: Sequence[ComparedRun]) -> str:
    """Return a sentence on the agreement of predicted and measured order within each job; empty without an
    order."""
    order, clear = pooled_agreement(runs), pooled_agreement(runs, apart=APART)
    if order.tau is None:
        return ""
    text = f"Order of seconds: Kendall's tau {order.tau:.2f} over {order.pairs} pairs of recipes"
    if clear.pairs:
        text += (
            f"; of the {clear.pairs} that were measured more than {100 * APART:g} % apart, "
            f"{clear.concordant} are in the predicted order"
        )
    return text + "."


def gap_line(runs: Sequence[ComparedRun]) -> str:
    """Return a sentence on the slowdown of a job's first choice against the fastest measured recipe; empty
    without both."""
    slower = gap(runs)
    if slower is None:
        return ""
    if slower == 0:
        return "The first choice is the fastest measured one."
    fastest = min((run for run in runs if run.seconds), key=lambda run: run.step_seconds or 0.0)
    return f"The first choice is {100 * slower:.1f} % slower than the fastest measured one: {fastest.recipe}."


def _ranks(seconds: Iterable[tuple[int, float | None]]) -> dict[int, str]:
    """Return the rank of each number of seconds, 1 for the fastest."""
    known = sorted((duration, number) for number, duration in seconds if duration)
    return {number: str(rank) for rank, (_, number) in enumerate(known, 1)}


def _mib(amount: int | None) -> str:
    return "" if amount is None else show_mib(amount)
