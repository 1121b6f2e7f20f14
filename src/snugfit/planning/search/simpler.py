"""Among recipes that are as fast the simplest: a technique that buys nothing is one more thing to explain.

The fastest recipe that fits may hold techniques that gain less than anybody can measure: TensorFloat-32
beside bfloat16, worker processes for a step that the GPU bounds, another allocator where memory is plenty. So
what stands in some of its slots is put back to what the user has there, or to plain where nothing is known of
the user's own recipe, in every way; and of the recipes that still fit and are as fast, the one with the
fewest changes is the answer. The other rows of the front are made as simple, where that costs no memory
either and was judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

from snugfit.planning.search.state import TIME_BOUND_MARGIN
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.planning.search.space import Space
    from snugfit.planning.search.state import SearchState
    from snugfit.prediction.worker_pool import WorkerPool

AS_FAST = 0.005
"""Of a step's seconds (chosen): what is less than this slower is as fast; of bytes, as small."""


def prefer_simple(state: SearchState, pool: WorkerPool, fastest: int) -> int:
    """The simplest candidate that is as fast as this one, the fastest that fits; whatever could be is judged.
    Raises `BelowLowerBound`."""

    def fits(needed_bytes: int) -> bool:
        return state.memory_bytes is None or needed_bytes <= state.memory_bytes

    most_seconds = state.judged[fastest].seconds * (1 + AS_FAST)
    state.screen_these(
        simpler_than(state.space, fastest),
        lambda least: least.seconds <= most_seconds and fits(least.needed_bytes),
    )
    state.judge(state.by_trace(unknown_simpler(state, fastest, fits)), pool)
    return simplest(state, fastest, lambda number: fits(state.judged[number].needed_bytes))


def judge_simpler(state: SearchState, pool: WorkerPool, front: Sequence[int]) -> None:
    """Judges what `simplify_front` may put in the place of these and differs in the update alone. Raises
    `BelowLowerBound`."""
    candidates, simpler = state.space.candidates, set[int]()
    for number in front:
        most = int(state.judged[number].needed_bytes * (1 + AS_FAST))
        unknown = unknown_simpler(state, number, most.__ge__)
        simpler.update(other for other in unknown if candidates[other].sized == candidates[number].sized)
    state.judge(state.by_trace(sorted(simpler)), pool)


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
    space = state.space
    return min([fastest, *as_fast], key=lambda n: (space.changes(space.candidates[n].recipe), *state.rank(n)))


def simplify_front(state: SearchState, front: Sequence[int], fits: Callable[[int], bool]) -> list[int]:
    """The front, the fastest first, with the simplest recipe that was judged for each that is as fast, as
    small, and fits where that one does."""
    simple = set()
    for number in front:
        most = state.judged[number].needed_bytes * (1 + AS_FAST)

        def as_small(other: int, most: float = most, must_fit: bool = fits(number)) -> bool:
            return state.judged[other].needed_bytes <= most and (fits(other) or not must_fit)

        simple.add(simplest(state, number, as_small))
    return state.front(simple)


def simpler_than(space: Space, number: int) -> Sequence[int]:
    """The candidates that are this one with the simplest technique in one or more of its slots."""
    if number not in space.simpler:
        space.simpler[number] = tuple(_simpler_than(space, number))
    return space.simpler[number]


def _simpler_than(space: Space, number: int) -> Iterator[int]:
    recipe = space.candidates[number].recipe
    slots = [slot for slot in Slot if recipe[slot] != space.simplest[slot]]
    for count in range(1, len(slots) + 1):
        for some in combinations(slots, count):
            other = space.variant(number, *(space.simplest[slot] for slot in some))
            if other is not None:
                yield other
