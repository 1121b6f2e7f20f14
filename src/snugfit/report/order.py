"""Sentences about an order: whether what was foreseen to be faster was, and what choosing by it costs."""

from __future__ import annotations

from collections.abc import Sequence

from snugfit.comparison.ranking import APART, gap, pooled
from snugfit.comparison.runs import Run


def order_line(runs: Sequence[Run]) -> str:
    """How much of the order within each job held; nothing where there is no order."""
    order, clear = pooled(runs), pooled(runs, apart=APART)
    if order.tau is None:
        return ""
    text = f"Order of seconds: Kendall's tau {order.tau:.2f} over {order.pairs} pairs of recipes"
    if clear.pairs:
        text += (
            f"; of the {clear.pairs} that were measured more than {100 * APART:g} % apart, {clear.right} are "
            "in the foreseen order"
        )
    return text + "."


def gap_line(runs: Sequence[Run]) -> str:
    """How far the first choice is from the best that was measured; nothing where no choice was measured."""
    lost = gap(runs)
    if lost is None:
        return ""
    if lost == 0:
        return "The first choice is the fastest measured one."
    fastest = min((run for run in runs if run.seconds), key=lambda run: run.step_seconds or 0.0)
    return f"The first choice is {100 * lost:.1f} % slower than the fastest measured one: {fastest.recipe}."
