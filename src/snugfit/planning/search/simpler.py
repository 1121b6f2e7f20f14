"""Select the simplest of equally fast recipes, without techniques whose gain is negligible.

The fastest recipe that fits may contain techniques with a gain too small to measure. Examples are
TensorFloat-32 next to bfloat16, loader workers for a step bound by the GPU, and another allocator with much
free memory. Its slots are therefore reset to the user's own techniques (or plain ones) in every combination.
The best recipe is the one with the fewest changes among those that still fit and are as fast. Other recipes
of the Pareto front are simplified too, if the simpler one is as small and was evaluated.
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
"""Largest relative difference at which the seconds of two recipes count as equal (chosen). It applies to
their bytes too.
"""


def prefer_simple(state: SearchState, pool: WorkerPool, fastest: int) -> int:
    """Return the recipe with the fewest changes from the user's that is as fast as `fastest`, the fastest
    that fits. All possible ones are simulated. Raises `BelowLowerBound`.
    """

    def fits(needed_bytes: int) -> bool:
        return state.memory_bytes is None or needed_bytes <= state.memory_bytes

    most_seconds = state.evaluated[fastest].seconds * (1 + AS_FAST)
    state.screen_these(
        simpler_than(state.space, fastest),
        lambda least: least.seconds <= most_seconds and fits(least.needed_bytes),
    )
    state.evaluate(state.by_trace(unknown_simpler(state, fastest, fits)), pool)
    return simplest(state, fastest, lambda number: fits(state.evaluated[number].needed_bytes))


def evaluate_simpler(state: SearchState, pool: WorkerPool, front: Sequence[int]) -> None:
    """Simulate simpler variants of these recipes, which differ only in the optimizer update, for
    `simplify_front`. Their results are in `state` afterwards. Raises `BelowLowerBound`.
    """
    candidates, simpler = state.space.candidates, set[int]()
    for number in front:
        most = int(state.evaluated[number].needed_bytes * (1 + AS_FAST))
        unknown = unknown_simpler(state, number, most.__ge__)
        simpler.update(other for other in unknown if candidates[other].sized == candidates[number].sized)
    state.evaluate(state.by_trace(sorted(simpler)), pool)


def unknown_simpler(state: SearchState, fastest: int, may_fit: Callable[[int], bool]) -> Iterator[int]:
    """Yield simpler variants of a recipe that are not simulated yet, but may fit and be as fast by their
    lower bounds. `may_fit` returns True for needed bytes that may fit.
    """
    most = state.evaluated[fastest].seconds * (1 + AS_FAST)
    for number in simpler_than(state.space, fastest):
        least = state.bounds.get(number)
        if not least or number in state.evaluated or least.seconds * (1 - TIME_BOUND_MARGIN) > most:
            continue
        if may_fit(least.needed_bytes):
            yield number


def simplest(state: SearchState, fastest: int, fits: Callable[[int], bool]) -> int:
    """Return the evaluated recipe with the fewest changes that fits and is about as fast as the recipe
    `fastest`."""
    most = state.evaluated[fastest].seconds * (1 + AS_FAST)
    as_fast = [
        number
        for number in simpler_than(state.space, fastest)
        if number in state.evaluated and state.evaluated[number].seconds <= most and fits(number)
    ]
    space = state.space
    return min([fastest, *as_fast], key=lambda n: (space.changes(space.candidates[n].recipe), *state.rank(n)))


def simplify_front(state: SearchState, front: Sequence[int], fits: Callable[[int], bool]) -> list[int]:
    """Return the Pareto front, the fastest first, with each recipe replaced by the simplest equivalent
    evaluated one.

    An equivalent is as fast, as small, and fits if the original fits.
    """
    simple = set()
    for number in front:
        most = state.evaluated[number].needed_bytes * (1 + AS_FAST)

        # Default values bind the variables of this iteration.
        def as_small(other: int, most: float = most, must_fit: bool = fits(number)) -> bool:
            return state.evaluated[other].needed_bytes <= most and (fits(other) or not must_fit)

        simple.add(simplest(state, number, as_small))
    return state.front(simple)


def simpler_than(space: Space, number: int) -> Sequence[int]:
    """Return the variants of a recipe that have the default technique in one or more slots (such as the
    optimizer), and are otherwise equal.
    """
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
