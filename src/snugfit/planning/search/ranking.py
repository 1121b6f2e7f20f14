"""The best recipes after the best: what `--verify` measures.

The front holds what no other beats both in speed and in bytes, so the second fastest recipe is mostly not on
it. Here recipes are judged further, in the order of the least that they can take, until no recipe that was
not judged can be among the best. Recipes that differ in nothing that a clock sees (the allocator's segments,
the precision of products that there are none of) take the same seconds, and count once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError
from snugfit.planning.search.state import SLACK
from snugfit.prediction.worker_pool import Question, WorkerPool

if TYPE_CHECKING:
    from snugfit.planning.search.state import Searched

TOGETHER = 4
"""Traces for each place that are judged before it is asked again whether that is enough."""


def best(
    found: Searched,
    pool: WorkerPool,
    count: int,
    *,
    memory_bytes: int | None,
    objective: str,
    tell: Callable[[str], None] = lambda what: None,
) -> list[int]:
    """The numbers of the best `count` recipes that fit and are timed differently, the best first; fewer
    where there are no more. Raises `BelowLowerBound` as the search does."""
    groups, homes = deque(_groups(found, memory_bytes, objective)), dict[int, int]()
    while True:
        ranked = _ranked(found, memory_bytes, objective)[:count]
        worst = _worth(found, ranked[-1], objective) if len(ranked) == count else None
        tell(f"judging the best {count}: {len(ranked)} found")
        todo: deque[list[int]] = deque()
        while groups and len(todo) < TOGETHER * len(pool.workers):
            if worst is not None and _least(found, groups[0][0], objective) >= worst:
                break
            todo.append(groups.popleft())
        if not todo:
            return ranked
        _judge(found, pool, todo, homes)


def _groups(found: Searched, memory_bytes: int | None, objective: str) -> list[list[int]]:
    """What was not judged and could fit, those of one trace together, in the order of the least it takes."""
    traces: dict[int, list[int]] = defaultdict(list)
    for number in sorted(found.bounds, key=lambda each: _least(found, each, objective)):
        could_fit = memory_bytes is None or found.bounds[number].needed_bytes <= memory_bytes
        if number not in found.judged and could_fit:
            traces[found.space.candidates[number].trace].append(number)
    return list(traces.values())


def _judge(found: Searched, pool: WorkerPool, todo: deque[list[int]], homes: dict[int, int]) -> None:
    """Judges these; all that share their passes in one place, which `homes` tells."""
    asked: dict[int, list[int]] = {}

    def ask(worker: int) -> Question | None:
        for group in todo:
            if homes.setdefault(found.space.candidates[group[0]].sized, worker) == worker:
                todo.remove(group)
                asked[group[0]] = group
                return Question(group[0], "judge", ([found.space.candidates[each].setup for each in group],))
        return None

    for number, answer in pool.answers(ask):
        if isinstance(answer, SnugfitError):
            continue
        for each, (figures,) in zip(asked.pop(number), answer, strict=True):
            found.judge(each, figures)


def _ranked(found: Searched, memory_bytes: int | None, objective: str) -> list[int]:
    """Of those judged that fit, one for each length of a step, the best first."""

    def order(number: int) -> tuple[Any, ...]:
        worth = _worth(found, number, objective)
        return worth, *found.rank(number)

    fitting = (
        number
        for number, figures in found.judged.items()
        if memory_bytes is None or figures.needed_bytes <= memory_bytes
    )
    return list(_different(found, sorted(fitting, key=order)))


def _different(found: Searched, numbers: list[int]) -> Iterator[int]:
    seen: set[float] = set()
    for number in numbers:
        seconds = found.judged[number].seconds
        if seconds not in seen:
            seen.add(seconds)
            yield number


def _worth(found: Searched, number: int, objective: str) -> float:
    figures = found.judged[number]
    return figures.needed_bytes if objective == "memory" else figures.seconds


def _least(found: Searched, number: int, objective: str) -> float:
    least = found.bounds[number]
    return least.needed_bytes if objective == "memory" else least.seconds * (1 - SLACK)
