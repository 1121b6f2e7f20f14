"""A verified plan in a terminal and in Markdown: its best recipes foreseen beside seen, whether their order
held, and what the calibration learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType

from snugfit.comparison.learn import Learned, mean_size
from snugfit.comparison.runs import Run
from snugfit.comparison.verify import Verification
from snugfit.planning.plan import Plan
from snugfit.report.grid import Grid, escape, terminal
from snugfit.report.grid import markdown as markdown_table
from snugfit.report.order import gap_line, order_line
from snugfit.report.terminal import words
from snugfit.units import show_mib


def render(found: Verification) -> RenderableType:
    """The verification for a terminal."""
    complaints = (words(line, "red") for line in _complaints(found))
    return Group(terminal(grid(found)), *(words(line) for line in told(found)), *complaints)


def markdown(found: Verification) -> str:
    """The same for a file."""
    lines = [*told(found), *_complaints(found)]
    return markdown_table(grid(found)) + "".join(f"\n{escape(line)}\n" for line in lines)


def document(plan: Plan, found: Verification) -> dict[str, Any]:
    """The same as JSON: the plan, and every run."""
    return {**found.to_json(), "plan": plan.to_json()}


def grid(found: Verification) -> Grid:
    """One row a recipe, in the plan's order; errors are the shares by which predictions are too high."""
    where = found.device or "not measured"
    places = _places(found)
    heads = ("", "Recipe", "NVML MiB>", "seen>", "allocated %>", "reserved %>", "NVML %>")
    return Grid(
        title=f"The plan's best, foreseen for {found.gpu} and measured on {where}",
        heads=(*heads, "ms a step>", "seen>", "%>", "place seen>"),
        rows=tuple(_row(run, places.get(run.number)) for run in found.runs),
    )


def _row(run: Run, place: int | None) -> tuple[str, ...]:
    measured = run.measured if run.outcome == "ok" else None
    seen = _mib(measured.nvml_bytes if measured else None) or (run.outcome if not measured else "") or ""
    return (
        str(run.number + 1),
        str(run.recipe),
        _mib(run.predicted.nvml_bytes if run.predicted else None),
        seen,
        *(_per_cent(run.error(f"{what}_bytes")) for what in ("allocated", "reserved", "nvml")),
        _ms(run.predicted_step_seconds),
        _ms(run.step_seconds),
        _per_cent(run.error("step_seconds")),
        "" if place is None else str(place),
    )


def _places(found: Verification) -> dict[int, int]:
    """The place of each run among those measured, the fastest first."""
    seen = sorted((run for run in found.runs if run.seconds), key=lambda run: run.step_seconds or 0.0)
    return {run.number: place for place, run in enumerate(seen, 1)}


def told(found: Verification) -> Iterator[str]:
    """What follows from the rows, a sentence each."""
    yield from filter(None, (order_line(found.runs), gap_line(found.runs)))
    if found.learned:
        yield learned_line(found.learned)
    for run in found.runs:
        spoilt = run.contaminated or run.crowded
        if spoilt and run.outcome == "ok":
            yield f"{run.recipe} was not measured alone: {spoilt}."


def learned_line(learned: Learned) -> str:
    """What the calibration took in, or why nothing."""
    if not learned.taken:
        return f"Nothing was learned: {learned.why_not}."
    before, after = 100 * mean_size(learned.before), 100 * mean_size(learned.after)
    return (
        f"Learned from {len(learned.before)} runs: the host takes {learned.host:.2f} times and the device "
        f"{learned.device:.2f} times as long as the rates said. Mean error of the seconds: {before:.1f} % "
        f"before, {after:.1f} % after. From now on predictions for this GPU use it ({learned.file})."
    )


def _complaints(found: Verification) -> Iterator[str]:
    for run in found.outside:
        yield f"{run.recipe}: {run.complaint}"
        if run.message:
            yield run.message.strip().splitlines()[-1]


def _mib(amount: int | None) -> str:
    return "" if amount is None else show_mib(amount)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.1f}"


def _per_cent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:+.2f}"
