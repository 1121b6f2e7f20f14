"""Which rows of a plan's front are worth reading: a few, each of which differs from the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snugfit.planning.plan import Choice, Plan

MOST_ROWS = 8
APART = 0.03
"""Of bytes or of seconds: rows that differ by less in both are one answer."""

SLOWEST = 5
"""Times the seconds of the best: what is slower is no alternative to it."""


def shown_front(plan: Plan, *, everything: bool = False) -> list[Choice]:
    """The rows to show, the fastest first: the answer, and of the others those that differ from it and from
    each other; all of them where `everything` is asked for."""
    answer = plan.best_or_nearest
    if everything:
        return sorted({answer, *plan.front}, key=_order)
    rows = [answer]
    for choice in plan.front:
        too_slow = choice.step_seconds > SLOWEST * answer.step_seconds
        if not too_slow and all(_differ(choice, other) for other in rows):
            rows.append(choice)
    rows.sort(key=_order)
    if len(rows) <= MOST_ROWS:
        return rows
    rows.remove(answer)
    last = len(rows) - 1
    spread = [rows[round(n * last / (MOST_ROWS - 2))] for n in range(MOST_ROWS - 1)]
    return sorted([answer, *spread], key=_order)


def _differ(one: Choice, other: Choice) -> bool:
    return (
        abs(one.needed_bytes - other.needed_bytes) >= APART * other.needed_bytes
        or abs(one.step_seconds - other.step_seconds) >= APART * other.step_seconds
    )


def _order(choice: Choice) -> tuple[float, int, str]:
    return choice.step_seconds, choice.needed_bytes, choice.recipe
