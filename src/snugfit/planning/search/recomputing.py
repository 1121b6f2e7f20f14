"""Kinds of passes that recompute activations, which most searches need not look at.

Recomputing adds kernels to a step and leaves none out, and it changes nothing of what is live in an update:
weights, gradients, states. So what a recipe takes without recomputing bounds it with: as long, and as large
as the update. Where a recipe that was judged is as fast as that and as small, no kind of recomputing has to
be rehearsed for it. With adapters in the space, that is all of full fine-tuning. The kinds that may be
fastest are rehearsed and judged first, a few at a time: they make most of the others needless.

What bounds here is no law: keys and values of a cache that only checkpointing switches off cost a little,
hence `CACHE_SHARE`. So each kind that is rehearsed is held to it, and where one takes less, all are
rehearsed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from snugfit.planning.cost.figures import Bound
from snugfit.planning.search.screening import screen
from snugfit.techniques import roster
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.planning.search.progress import Tell
    from snugfit.planning.search.state import SearchState
    from snugfit.prediction.worker_pool import WorkerPool

CACHE_SHARE = 0.1
"""Of the seconds of a step without recomputing, how much less one with it may take."""

NOTHING = Bound(0, 0.0)


class RecomputingKinds:
    """The kinds of passes of a search that recompute, as far as nobody has looked at them."""

    def __init__(self, state: SearchState, pool: WorkerPool, tell: Tell) -> None:
        self.state, self.pool, self.tell = state, pool, tell
        self.waiting: dict[int, list[int]] = defaultdict(list)
        """By kind of passes, the candidates."""
        keep = roster.plain(Slot.CHECKPOINTING)
        self._without: dict[int, int | None] = {}
        for number, candidate in enumerate(state.space.candidates):
            if candidate.setup.checkpoint is not None:
                self.waiting[candidate.passes].append(number)
                self._without[number] = state.space.number(candidate.recipe.with_(keep))
        state.screen_these = self.screen_these

    def screen(self, is_needed: Callable[[int, Bound], bool], most: int | None = None) -> list[int]:
        """Gives those kinds their lower bounds of which a candidate `is_needed`, by the least that is known
        of it; of many the `most` that may be fastest. The candidates of these kinds."""
        kinds = [
            kind
            for kind, numbers in self.waiting.items()
            if any(is_needed(number, self._least(number)) for number in numbers)
        ]
        kinds.sort(key=lambda kind: min(self._least(number).seconds for number in self.waiting[kind]))
        asked = {number: self._least(number) for kind in kinds[:most] for number in self.waiting.pop(kind)}
        if asked:
            self.add(kinds[:most])
        known = self.state.bounds
        if any(
            known[number].seconds < least.seconds or known[number].needed_bytes < least.needed_bytes
            for number, least in asked.items()
            if number in known
        ):
            return [*asked, *self.screen(lambda number, least: True)]
        return list(asked)

    def add(self, kinds: Collection[int]) -> None:
        """Gives the candidates of these kinds of passes their lower bounds."""
        screening = screen(self.state.space, self.pool, self.tell, kinds)
        self.state.bounds |= {number: bound for number, (bound,) in screening.bounds.items()}
        self.state.excluded += screening.excluded
        self.state.kinds += screening.kinds

    def screen_these(self, numbers: Iterable[int]) -> None:
        """Gives the kinds of these candidates their lower bounds."""
        asked = set(numbers)
        self.screen(lambda number, least: number in asked)

    def _least(self, number: int) -> Bound:
        without = self._without[number]
        known = NOTHING if without is None else self.state.bounds.get(without, NOTHING)
        return Bound(known.resting_bytes, known.seconds * (1 - CACHE_SHARE))
