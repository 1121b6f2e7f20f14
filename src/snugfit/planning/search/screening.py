"""The first look at a space: the lower bounds of each candidate, on each GPU that is asked about."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from snugfit.errors import SnugfitError
from snugfit.planning.plan import Exclusion
from snugfit.planning.search.progress import Progress, Tell
from snugfit.planning.search.state import exclusion
from snugfit.prediction.worker_pool import Question, WorkerPool

if TYPE_CHECKING:
    from snugfit.planning.cost.figures import Bound
    from snugfit.planning.search.space import Space


@dataclass
class Screening:
    """What the first look showed."""

    bounds: dict[int, tuple[Bound, ...]] = field(default_factory=dict)
    """The least that a candidate can take, by its number, on each GPU."""
    excluded: list[Exclusion] = field(default_factory=list)
    """What could not be rehearsed."""


def screen(
    space: Space, pool: WorkerPool, tell: Tell = lambda what: None, numbers: Collection[int] | None = None
) -> Screening:
    """Gives every candidate its lower bounds, or some. One worker begins at each end
    of the list, which is in the order of what updates depend on, so that few updates are rehearsed in both.
    Raises `SnugfitError` when nothing at all can be rehearsed."""
    groups: dict[int, list[int]] = defaultdict(list)
    for number in range(len(space.candidates)) if numbers is None else numbers:
        groups[space.candidates[number].passes].append(number)
    order = sorted(groups.values(), key=lambda group: repr(space.candidates[group[0]].update))
    waiting = deque(range(len(order)))
    screening = Screening()
    tell(f"estimating {len(order)} kinds of steps")
    progress = Progress("screening", len(order), tell)

    def ask(worker: int) -> Question | None:
        if not waiting:
            return None
        index = waiting.pop() if worker % 2 else waiting.popleft()
        return Question(index, "screen", ([space.candidates[number].setup for number in order[index]],))

    for index, answer in pool.answers(ask, helped=True):
        progress.step()
        if isinstance(answer, SnugfitError):
            screening.excluded.append(exclusion(space, order[index], answer))
            continue
        refused: dict[str, list[int]] = defaultdict(list)
        for number, bounds in zip(order[index], answer, strict=True):
            if isinstance(bounds, SnugfitError):
                refused[str(bounds)].append(number)
            else:
                screening.bounds[number] = bounds
        screening.excluded += [
            Exclusion(what=str(space.candidates[group[0]].recipe), why=why, recipes=len(group))
            for why, group in refused.items()
        ]
    if numbers is None and not screening.bounds:
        why = screening.excluded[0].why if screening.excluded else "there is none"
        raise SnugfitError(f"No recipe could be simulated: {why}")
    return screening
