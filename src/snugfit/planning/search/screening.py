"""Compute lower bounds of the bytes and seconds of recipes (screening) in worker processes."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError
from snugfit.planning.plan import Exclusion
from snugfit.planning.search.progress import Progress, Tell
from snugfit.planning.search.state import SearchState, exclusion
from snugfit.prediction.worker_pool import Question, WorkerPool

if TYPE_CHECKING:
    from snugfit.planning.cost.figures import Bound
    from snugfit.planning.search.space import Space


@dataclass
class Screening:
    """Lower bounds of recipes' bytes and seconds, and the recipes that cannot be simulated."""

    bounds: dict[int, Bound] = field(default_factory=dict)
    """Lower bound of each recipe's bytes and seconds, by number."""
    excluded: list[Exclusion] = field(default_factory=list)
    """Recipes that cannot be simulated, each with the reason for its exclusion."""


def screen(state: SearchState, pool: WorkerPool, tell: Tell, numbers: Collection[int]) -> Screening:
    """Compute the lower bounds of these recipes in the worker processes.

    Recipes are sorted by their optimizer update. One worker begins at each end of the list, so few updates
    are simulated in both. Recipes with compiled layers go to the worker that has compiled them.
    """
    space = state.space
    order = groups_by_passes(space, numbers)
    waiting = deque(range(len(order)))
    screening = Screening()
    tell(f"estimating {len(order)} groups of recipes")
    progress = Progress("screening", len(order), tell)

    def next_call(worker: int) -> Question | None:
        for index in reversed(waiting) if worker % 2 else waiting:
            setups = [space.candidates[number].setup for number in order[index]]
            if not state.is_reserved(first := order[index][0]) or state.is_for(worker, first):
                waiting.remove(index)
                return Question(index, "screen", (setups,))
        return None

    for answer in pool.results(next_call, helped=True):
        progress.step()
        noted = note(space, order[answer.number], answer.value)
        screening.bounds |= noted.bounds
        screening.excluded += noted.excluded
    return screening


def groups_by_passes(space: Space, numbers: Collection[int]) -> list[list[int]]:
    """Group these recipes by equal forward and backward passes, and compiled ones by micro-batch size too."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for number in numbers:
        candidate = space.candidates[number]
        compiled = candidate.setup.lowering is not None
        groups[candidate.passes, candidate.program if compiled else None].append(number)
    return sorted(groups.values(), key=lambda group: repr(space.candidates[group[0]].update))


def note(space: Space, group: Sequence[int], answer: Any) -> Screening:
    """Convert a worker's result for a group of recipes to lower bounds, and to the reasons why some cannot be
    simulated.
    """
    if isinstance(answer, SnugfitError):
        return Screening(excluded=[exclusion(space, [*group], answer)])
    screening = Screening()
    refused: dict[str, list[int]] = defaultdict(list)
    for number, bounds in zip(group, answer, strict=True):
        if isinstance(bounds, SnugfitError):
            refused[str(bounds)].append(number)
        else:
            (screening.bounds[number],) = bounds
    screening.excluded += [
        Exclusion(what=str(space.candidates[numbers[0]].recipe), why=reason, recipes=len(numbers))
        for reason, numbers in refused.items()
    ]
    return screening
