"""A verified plan in a terminal and in Markdown: its best recipes, predicted beside measured, whether their
order held, and what the calibration learned."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from snugfit.evaluation.learn import LearnedFactors
from snugfit.evaluation.verify import Verification
from snugfit.planning.plan import Plan
from snugfit.report.evaluation.order import gap_line, order_line, recipes_grid
from snugfit.report.text.grid import Grid
from snugfit.report.text.page import Page, Sentence


def render(verified: Verification) -> Page:
    """Each recipe predicted and measured, and what follows from it."""
    return Page(
        [grid(verified)], conclusions(verified), (Sentence(text, "fault") for text in _complaints(verified))
    )


def document(plan: Plan, verified: Verification) -> dict[str, Any]:
    """The same as JSON: the plan, and every run."""
    return {**verified.to_json(), "plan": plan.to_json()}


def grid(verified: Verification) -> Grid:
    """One row a recipe, in the plan's order."""
    where = verified.device or "not measured"
    return recipes_grid(
        verified.runs, f"The plan's best, predicted for {verified.gpu} and measured on {where}"
    )


def conclusions(verified: Verification) -> Iterator[str]:
    """What follows from the rows, a sentence each."""
    yield from filter(None, (order_line(verified.runs), gap_line(verified.runs)))
    if verified.learned:
        yield learned_line(verified.learned)
    for run in verified.runs:
        spoilt = run.contaminated or run.crowded
        if spoilt and run.outcome == "ok":
            yield f"{run.recipe} was disturbed while it was measured: {spoilt}."


def learned_line(learned: LearnedFactors) -> str:
    """What the calibration took in, or why nothing."""
    if not learned.changes_rates:
        return f"Nothing was learned: {learned.why_not}."
    before, after = (100 * fmean(map(abs, errors)) for errors in (learned.before, learned.after))
    return (
        f"Learned from {len(learned.before)} runs: the host takes {learned.host:.2f} times and the device "
        f"{learned.device:.2f} times as long as the rates say. Mean error of the seconds: {before:.1f} % "
        f"before, {after:.1f} % after. Predictions for this GPU now use this ({learned.file})."
    )


def _complaints(verified: Verification) -> Iterator[str]:
    for run in verified.outside:
        yield f"{run.recipe}: {run.complaint}"
        if run.message:
            yield run.message.strip().splitlines()[-1]
