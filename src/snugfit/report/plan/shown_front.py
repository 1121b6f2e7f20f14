"""Selection of a few recipes from a plan's Pareto front of memory and time that differ from each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snugfit.planning.plan import SLOWEST

if TYPE_CHECKING:
    from snugfit.planning.plan import Choice, Plan

MOST_ROWS = 8
MIN_DIFFERENCE = 0.03
"""Relative difference below which two recipes count as one, if both their bytes and their seconds differ by
less."""

NEAR_MISSES = 2
"""Largest number of recipes in the table that almost fit, if others fit."""


def shown_front(plan: Plan, *, everything: bool = False, most: int = MOST_ROWS) -> list[Choice]:
    """Return the recipes of the Pareto front to show, at most `most`: the best one, and others that differ
    from each other.

    Fitting recipes come first, the fastest first, then those that almost fit. With `everything` all are
    returned.
    """
    answer = plan.best_or_nearest

    def order(choice: Choice) -> tuple[bool, float, int, str]:
        return not plan.fitting(choice), choice.step_seconds, choice.needed_bytes, choice.recipe

    if everything:
        return sorted({answer, *plan.front}, key=order)
    rows = [answer]
    for choice in plan.front:
        too_slow = choice.step_seconds > SLOWEST * answer.step_seconds
        if not too_slow and all(_differ(choice, other) for other in rows):
            rows.append(choice)
    rows.sort(key=order)
    # If no recipe fits, every row is a recipe that almost fits.
    missing = [choice for choice in rows if plan.fits and not plan.fitting(choice)]
    near = sorted(missing, key=lambda choice: choice.needed_bytes)[: min(NEAR_MISSES, most // 3)]
    rows = [choice for choice in rows if choice not in missing]
    most -= len(near)
    if len(rows) > most:
        # The chosen recipe is always shown, and a sample of the others with the smallest and the fastest.
        rows.remove(answer)
        last = len(rows) - 1
        rows = [answer, *(rows[last - round(n * last / max(1, most - 2))] for n in range(most - 1))]
    return sorted([*rows, *near], key=order)


def _differ(first: Choice, other: Choice) -> bool:
    return (
        abs(first.needed_bytes - other.needed_bytes) >= MIN_DIFFERENCE * other.needed_bytes
        or abs(first.step_seconds - other.step_seconds) >= MIN_DIFFERENCE * other.step_seconds
    )
