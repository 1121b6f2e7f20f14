"""The best recipes after the best: what `--verify` measures.

The front holds what no other recipe dominates in speed and bytes, so the second fastest is mostly not on it.
Here recipes are judged further, in the order of their lower bounds, until no recipe that was not judged can
be among the best. Recipes that differ in nothing that a clock sees (the allocator's segments, the precision
of products that there are none of) take the same seconds, and count once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from snugfit.planning.search.state import TIME_BOUND_MARGIN

if TYPE_CHECKING:
    from snugfit.planning.search.state import SearchState
    from snugfit.prediction.worker_pool import WorkerPool

TOGETHER = 4
"""Traces for each worker that are judged before it is asked again whether that is enough."""


def rank_best(
    state: SearchState,
    pool: WorkerPool,
    count: int,
    *,
    memory_bytes: int | None,
    objective: str,
    tell: Callable[[str], None] = lambda what: None,
) -> list[int]:
    """The numbers of the best `count` recipes that fit and are timed differently, the best first; fewer
    where there are no more. Raises `BelowLowerBound` as the search does."""

    def least(number: int) -> float:
        bound = state.bounds[number]
        return bound.needed_bytes if objective == "memory" else bound.seconds * (1 - TIME_BOUND_MARGIN)

    def may_be_listed(number: int) -> bool:
        could_fit = memory_bytes is None or state.bounds[number].needed_bytes <= memory_bytes
        return number not in state.judged and could_fit

    waiting = deque(state.traces(filter(may_be_listed, sorted(state.bounds, key=least))))
    while True:
        ranked = _ranking(state, memory_bytes, objective)[:count]
        worst = _value(state, ranked[-1], objective) if len(ranked) == count else None
        tell(f"judging the best {count}: {len(ranked)} found")
        todo: list[list[int]] = []
        while waiting and len(todo) < TOGETHER * len(pool.workers):
            if worst is not None and least(waiting[0][0]) >= worst:
                break
            todo.append(waiting.popleft())
        if not todo:
            return ranked
        state.judge(todo, pool)


def _ranking(state: SearchState, memory_bytes: int | None, objective: str) -> list[int]:
    """Of those judged that fit, one for each length of a step, the best first."""

    def order(number: int) -> tuple[Any, ...]:
        return _value(state, number, objective), *state.rank(number)

    fitting = (
        number
        for number, figures in state.judged.items()
        if memory_bytes is None or figures.needed_bytes <= memory_bytes
    )
    by_seconds: dict[float, int] = {}
    for number in sorted(fitting, key=order):
        by_seconds.setdefault(state.judged[number].seconds, number)
    return list(by_seconds.values())


def _value(state: SearchState, number: int, objective: str) -> float:
    figures = state.judged[number]
    return figures.needed_bytes if objective == "memory" else figures.seconds
