"""Among recipes that are as fast the simplest: a technique that buys nothing is one more thing to explain.

The fastest recipe that fits may hold techniques that gain less than anybody can measure: TensorFloat-32
beside bfloat16, worker processes for a step that the GPU bounds, another allocator where memory is plenty. So
what stands in some of its slots is put back to plain, in every way; and of the recipes that still fit and are
as fast, the one with the fewest techniques that are not plain is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import TYPE_CHECKING

from snugfit.planning.search.space import not_plain
from snugfit.planning.search.state import TIME_BOUND_MARGIN
from snugfit.techniques import roster
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.planning.search.space import Space
    from snugfit.planning.search.state import SearchState
    from snugfit.prediction.worker_pool import WorkerPool

AS_FAST = 0.005
"""Of a step's seconds (chosen): what is less than this slower is as fast."""


def prefer_simple(state: SearchState, pool: WorkerPool, fastest: int) -> int:
    """The simplest candidate that is as fast as this one, the fastest that fits; whatever could be is judged.
    Raises `BelowLowerBound`."""

    def fits(needed_bytes: int) -> bool:
        return state.memory_bytes is None or needed_bytes <= state.memory_bytes

    state.screen_these(simpler_than(state.space, fastest))
    state.judge(state.by_trace(unknown_simpler(state, fastest, fits)), pool)
    return simplest(state, fastest, lambda number: fits(state.judged[number].needed_bytes))


def unknown_simpler(state: SearchState, fastest: int, may_fit: Callable[[int], bool]) -> Iterator[int]:
    """Simpler candidates that were not judged, and by their lower bounds may fit and be as fast. `may_fit` is
    asked about bytes."""
    most = state.judged[fastest].seconds * (1 + AS_FAST)
    for number in simpler_than(state.space, fastest):
        least = state.bounds.get(number)
        if not least or number in state.judged or least.seconds * (1 - TIME_BOUND_MARGIN) > most:
            continue
        if may_fit(least.needed_bytes):
            yield number


def simplest(state: SearchState, fastest: int, fits: Callable[[int], bool]) -> int:
    """Of those judged the simplest that fits and is as fast as this one, or this one itself."""
    most = state.judged[fastest].seconds * (1 + AS_FAST)
    as_fast = [
        number
        for number in simpler_than(state.space, fastest)
        if number in state.judged and state.judged[number].seconds <= most and fits(number)
    ]
    candidates = state.space.candidates
    return min([fastest, *as_fast], key=lambda n: (not_plain(candidates[n].recipe), *state.rank(n)))


def simpler_than(space: Space, number: int) -> Iterator[int]:
    """The candidates that are this one with the plain technique in one or more of its slots."""
    recipe = space.candidates[number].recipe
    slots = [slot for slot in Slot if recipe[slot] != roster.plain(slot)]
    for count in range(1, len(slots) + 1):
        for some in combinations(slots, count):
            plainer = recipe
            for slot in some:
                plainer = plainer.with_(roster.plain(slot))
            if (other := space.number(plainer)) is not None:
                yield other
