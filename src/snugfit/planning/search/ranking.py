"""Ranking of the best few recipes of a search, which `--verify` measures.

The Pareto front contains only recipes with no other one that is faster and smaller, so the second fastest is
mostly missing. For a list of the best few, further recipes are evaluated in the order of their lower bounds.
The evaluation ends when no remaining recipe can be among them.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from snugfit.planning.search.state import TIME_BOUND_MARGIN, SearchState

if TYPE_CHECKING:
    from snugfit.planning.search.progress import Tell
    from snugfit.prediction.worker_pool import WorkerPool

TOGETHER = 4
"""Number of traces that each worker process evaluates between two checks of the ranking."""


def rank_best(
    state: SearchState, count: int, pool: WorkerPool, objective: str, tell: Tell = lambda what: None
) -> list[int]:
    """Return the best `count` recipes that fit, the best first; fewer if there are no more. Recipes with
    equal seconds count once, such as those with another allocator setting. Raises `BelowLowerBound`.
    """

    def least(number: int) -> float:
        bound = state.bounds[number]
        return bound.needed_bytes if objective == "memory" else bound.seconds * (1 - TIME_BOUND_MARGIN)

    def may_be_listed(number: int) -> bool:
        return number not in state.judged and state.fits(state.bounds[number].needed_bytes)

    waiting = deque(state.by_trace(filter(may_be_listed, sorted(state.bounds, key=least))))
    while True:
        ranked = _ranking(state, objective)[:count]
        worst = _value(state, ranked[-1], objective) if len(ranked) == count else math.inf
        tell(f"checking the best {count}: {len(ranked)} found")
        todo: list[list[int]] = []
        while waiting and len(todo) < TOGETHER * len(pool.workers) and least(waiting[0][0]) < worst:
            todo.append(waiting.popleft())
        if not todo:
            return ranked
        state.judge(todo, pool)


def _ranking(state: SearchState, objective: str) -> list[int]:
    """Return the evaluated recipes that fit, the best first; of recipes with equal seconds only one."""
    fitting = [number for number, figures in state.judged.items() if state.fits(figures.needed_bytes)]
    by_seconds: dict[float, int] = {}
    for number in sorted(fitting, key=lambda one: (_value(state, one, objective), *state.rank(one))):
        by_seconds.setdefault(state.judged[number].seconds, number)
    return list(by_seconds.values())


def _value(state: SearchState, number: int, objective: str) -> float:
    figures = state.judged[number]
    return figures.needed_bytes if objective == "memory" else figures.seconds
