"""Table of a job's recipes by predicted and measured step time, and sentences on their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from snugfit.features.accuracy.compared_runs import ComparedRun
from snugfit.features.accuracy.ranking import MIN_DIFFERENCE, gap, pooled_agreement
from snugfit.report.text.grid import Grid
from snugfit.units import show_mib

BYTES = ("allocated_bytes", "reserved_bytes", "nvml_bytes")
HEADS = (
    "No.", "NVML MiB>", "measured>", "allocated %>", "reserved %>", "NVML %>", "ms a step>", "measured>",
    "%>", "rank>", "measured>", "Recipe<",
)  # fmt: skip


def recipes_grid(runs: Sequence[ComparedRun], title: str, note: str = "") -> Grid:
    """Return a table with one row for each recipe. Errors are relative to the measurement; ranks are by step
    time.
    """
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
    """Yield table cells for memory: predicted and measured MiB by NVML, or the cause of the failure, then the
    errors in per cent.
    """
    yield _mib(run.predicted.nvml_bytes if run.predicted else None)
    if run.outcome not in (None, "ok"):
        yield str(run.outcome)
    else:
        yield _mib(run.measured.nvml_bytes if run.measured else None)
    yield from (per_cent(run.error(figure)) for figure in BYTES)


def seconds_cells(run: ComparedRun) -> Iterator[str]:
    """Yield table cells for step time: predicted and measured milliseconds, and the error in per cent."""
    for seconds in (run.predicted_step_seconds, run.step_seconds if run.outcome == "ok" else None):
        yield "" if seconds is None else f"{seconds * 1e3:,.1f}"
    yield per_cent(run.error("step_seconds"), digits=1)


def per_cent(share: float | None, *, digits: int = 2, signed: bool = True) -> str:
    """Return a fraction as text in per cent, such as `+0.12`; empty for None."""
    if share is None:
        return ""
    return f"{100 * share:+.{digits}f}" if signed else f"{100 * share:.{digits}f}"


def order_line(runs: Sequence[ComparedRun]) -> str:
    """Return a sentence on the agreement between predicted and measured order of recipes. Return an empty
    text without two recipes to compare.
    """
    order, clear = pooled_agreement(runs), pooled_agreement(runs, min_difference=MIN_DIFFERENCE)
    if order.tau is None:
        return ""
    text = f"Order of seconds: Kendall's tau {order.tau:.2f} over {order.pairs} pairs of recipes"
    if clear.pairs:
        text += (
            f"; of the {clear.pairs} that were measured more than {100 * MIN_DIFFERENCE:g} % apart, "
            f"{clear.concordant} are in the predicted order"
        )
    return text + "."


def gap_line(runs: Sequence[ComparedRun]) -> str:
    """Return a sentence on the slowdown of a job's predicted fastest recipe against the measured fastest.
    Return an empty text without both.
    """
    slower = gap(runs)
    if slower is None:
        return ""
    if slower == 0:
        return "The first choice is the fastest measured one."
    fastest = min((run for run in runs if run.seconds), key=lambda run: run.step_seconds or 0.0)
    return f"The first choice is {100 * slower:.1f} % slower than the fastest measured one: {fastest.recipe}."


def _ranks(seconds: Iterable[tuple[int, float | None]]) -> dict[int, str]:
    """Return each run's rank by step time as text, by the run's number; 1 is the fastest."""
    known = sorted((duration, number) for number, duration in seconds if duration)
    return {number: str(rank) for rank, (_, number) in enumerate(known, 1)}


def _mib(amount: int | None) -> str:
    return "" if amount is None else show_mib(amount)
