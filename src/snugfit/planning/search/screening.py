"""The first look at a space: the least that each of its Setups takes, on each GPU that is asked about."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from snugfit.errors import SnugfitError
from snugfit.planning.plan import Exclusion
from snugfit.planning.search.space import Candidate, Space
from snugfit.planning.step_key import update_key
from snugfit.prediction.worker_pool import Question, WorkerPool

if TYPE_CHECKING:
    from snugfit.planning.cost.figures import Bound

Tell = Callable[[str], None]


@dataclass
class Screened:
    """What the first look showed."""

    bounds: dict[int, tuple[Bound, ...]] = field(default_factory=dict)
    """The least that a candidate takes, by its number, on each GPU."""

    excluded: list[Exclusion] = field(default_factory=list)
    """What could not be rehearsed."""

    kinds: int = 0
    """Of passes."""


def screened(space: Space, pool: WorkerPool, tell: Tell = lambda what: None) -> Screened:
    """Gives every candidate the least that it takes. One place begins at each end of the list, which is in
    the order of what updates depend on, so that few updates are rehearsed in both. Raises `SnugfitError` when
    nothing can be rehearsed."""
    groups: dict[int, list[int]] = defaultdict(list)
    for number, candidate in enumerate(space.candidates):
        groups[candidate.passes].append(number)
    order = sorted(groups.values(), key=lambda group: repr(update_key(space.candidates[group[0]].setup)))
    todo = deque(enumerate(order))
    found = Screened(kinds=len(order))
    progress = Progress("screening", len(order), tell)

    def ask(worker: int) -> Question | None:
        if not todo:
            return None
        index, group = todo.pop() if worker % 2 else todo.popleft()
        return Question(index, "screen", ([space.candidates[number].setup for number in group],))

    for index, answer in pool.answers(ask):
        progress.step()
        if isinstance(answer, SnugfitError):
            found.excluded.append(exclusion([space.candidates[number] for number in order[index]], answer))
        else:
            found.bounds.update(zip(order[index], answer, strict=True))
    if not found.bounds:
        why = found.excluded[0].why if found.excluded else "there is none"
        raise SnugfitError(f"No recipe could be simulated: {why}")
    return found


def exclusion(group: Sequence[Candidate], why: SnugfitError) -> Exclusion:
    """That these cannot be rehearsed."""
    return Exclusion(
        what=str(group[0].recipe),
        why=str(why).splitlines()[0],
        recipes=len(group),
    )


class Progress:
    """Tells how far a part of the search is, and how long it may still take."""

    def __init__(self, what: str, total: int, tell: Tell) -> None:
        self.what, self.total, self.tell = what, total, tell
        self.done, self.began = 0, time.monotonic()
        tell(f"{what} {total} kinds of steps" if what == "screening" else what)

    def step(self) -> None:
        """One more is done."""
        self.done += 1
        left = (time.monotonic() - self.began) / self.done * (self.total - self.done)
        self.tell(f"{self.what} {self.done} of {self.total}, about {left:.0f} s left")
