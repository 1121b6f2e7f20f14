"""One GPU's part in a search that several share: what it still has to know, and its answer.

Each GPU looks for one recipe only, the fastest that fits it or the smallest, and not for a whole front. So a
candidate is worth judging while it could still be that one: while it can fit, and its least seconds are not
above those of the best that is known to fit. Where nothing can fit, the smallest is looked for instead.

GPUs that share a search run the same kernels, and take workspaces and scratch of their own. The search judges
by the one that takes least (where another may take less, what comes near enough to fitting counts as if it
did); the answer is then simulated in full, by the GPU's own policy (`Parts.whole`). Where that shows that it
does not fit, the next one is looked for. Recipes that share their passes have their workspaces and scratch,
so what that simulation showed one of them to take more holds for all. Where it is very much more, the answer
is simulated by the search's policy too: what that takes must be what the search had found.

The smallest is exact where it is asked for. Where nothing fits, the nearest miss is the smallest up to
`NEARLY_AS_SMALL`, and of those that were looked at for it the fastest. Spans of layers that may be the
smallest are among them.

Of recipes that share their passes and differ in the update, those are not judged that are no faster by their
lower bounds than one that was judged and fits; nor, where nothing does, those that are no smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from snugfit.planning.fleet.own_bytes import OWN_SHARE, SIBLING_SHARE, OwnBytes
from snugfit.planning.plan import NEARLY_AS_SMALL
from snugfit.planning.search.recomputing import KINDS_AT_A_TIME, RecomputingKinds
from snugfit.planning.search.simpler import AS_FAST, simpler_than, simplest, unknown_simpler
from snugfit.planning.search.state import TIME_BOUND_MARGIN, SearchState
from snugfit.planning.search.twins import OnGpus

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.planning.cost.figures import Bound, Figures


SAME_SECONDS = 1e-9
"""Of a step's seconds, by how much sums of the same kernels in another order may differ."""

HELD_BACK = 2.0
"""How often as slow as the fastest kind that nobody has looked at, without its recomputing, a recipe must be
to wait for it (chosen): recomputing takes a third more."""


class PerGpuSearch:
    """What one GPU has to know in a search that several share; `index` is its own among them. `takes_less` is
    whether it may take less scratch than the one by which candidates are judged."""

    def __init__(
        self,
        gpu: Gpu,
        index: int,
        state: SearchState,
        smallest: bool,
        *,
        takes_less: bool = True,
        headroom_bytes: int = 0,
    ) -> None:
        self.gpu, self.index, self.state, self.smallest = gpu, index, state, smallest
        self.headroom_bytes, self._less_share = headroom_bytes, OWN_SHARE if takes_less else 0.0
        self.seeks_smallest = smallest
        """Whether the smallest is looked for: where it is asked for, or nothing can fit."""
        self._small_enough = 1.0 if smallest else 1 - NEARLY_AS_SMALL
        """Of the smallest, what must be below that to be looked for."""
        self._bound = (gpu.memory_bytes or 0) - headroom_bytes
        self.own: dict[int, bool] = {}
        """Candidates that were simulated in full by this GPU's own policy, and whether that took what they
        had been judged to take."""
        self._more: dict[Hashable, OwnBytes] = {}
        """By the passes, where one that has them was simulated so."""
        self._held_above = math.inf
        """Seconds above which nothing is judged for now."""
        self.sort()

    def sort(self) -> None:
        """Takes notice of what the state knows; to be called whenever it has got lower bounds."""
        bounds = self.state.bounds
        self._by_seconds = [number for *_, number in sorted((b[1], b[0], n) for n, b in bounds.items())]
        self._by_bytes = sorted(bounds, key=bounds.__getitem__)
        self._open: tuple[int, list[int]] = (-1, [])

    def hold_back(self, recomputing: RecomputingKinds) -> None:
        """Nothing is judged for now that is much slower than kinds that nobody has looked at may be."""
        self._held_above = HELD_BACK * recomputing.least_seconds(self.index, self._may_fit)
        self._open = (-1, [])

    def release(self) -> bool:
        """Nothing is held back any more; whether there is more to judge for it."""
        held, self._held_above, self._open = self._held_above, math.inf, (-1, [])
        return held < math.inf and any(self.open_candidates())

    def open_candidates(self) -> Iterable[int]:
        """What could be better than the answer of now and was not judged, the most hopeful first."""
        judged = len(self.state.judged)
        if self._open[0] != judged:  # nothing else is learned between two questions
            self._open = judged, list(self._open_candidates())
        return self._open[1]

    def is_hopeful(self) -> Callable[[Bound], bool]:
        """Whether a candidate with this lower bound could be better than the answer of now."""
        fitting = [] if self.smallest else self._fitting()
        enough = min((self.state.judged[number].seconds for number in fitting), default=math.inf)
        small_enough = self.state.smallest * self._small_enough

        def hopeful(least: Bound) -> bool:
            is_fast = least.seconds * (1 - TIME_BOUND_MARGIN) <= enough
            if fitting or not self.seeks_smallest:
                return (is_fast or not fitting) and self._may_fit(least.needed_bytes)
            return least.needed_bytes <= small_enough

        return hopeful

    def may_be_simpler(self) -> Callable[[int, Bound], bool]:
        """Whether a candidate with this lower bound could be a simpler answer than the one of now; none is
        looked for where nothing fits, or the smallest is asked for."""
        if self._fastest() is None:
            return lambda number, least: False
        answer = self.answer()
        simpler, most = {*simpler_than(self.state.space, answer)}, self.state.judged[answer].seconds

        def may_be(number: int, least: Bound) -> bool:
            is_fast = least.seconds <= most * (1 + AS_FAST)
            return number in simpler and is_fast and self._may_fit(least.needed_bytes)

        return may_be

    def _open_candidates(self) -> Iterator[int]:
        faster = [] if self.smallest else list(self._faster())
        yield from faster
        if not faster and (fastest := self._fastest()) is not None:
            yield from unknown_simpler(self.state, fastest, self._may_fit)
        if self.seeks_smallest and not (faster or (not self.smallest and self._fitting())):
            smaller = list(self._smaller())
            yield from smaller or self._faster_near()

    def seek_smallest(self) -> bool:
        """From now on looks for the smallest, where nothing fits; whether it did not before."""
        did_not = not self.seeks_smallest and not self._fitting()
        if did_not:
            self.seeks_smallest, self._open = True, (-1, [])
        return did_not

    def learn(self, number: int, figures: Figures) -> None:
        """This is what a candidate takes, by the policy that the search judges by."""
        self.state.learn(number, figures)
        if more := self._more.get(self.state.passes_of(number)):
            self.state.judged[number] = more.added_to(figures)

    def answer(self) -> int:
        """The best of those judged, of which the simplest; when none leaves the headroom the smallest, and
        when none fits the fastest of those that are nearly as small."""
        fastest = self._fastest()
        if fastest is not None:
            return simplest(self.state, fastest, self.fits) if self._surely_fits(fastest) else fastest
        if near := self._near():
            return self._first(near, lambda figures: (figures.seconds, figures.needed_bytes))
        judged = list(self.state.judged)
        return self._first(judged, lambda figures: (figures.needed_bytes, figures.seconds))

    def may_be_own(self, number: int, figures: Figures) -> bool:
        """Whether so many bytes may differ from those that are known by workspaces and scratch alone."""
        known = self.state.judged[number]
        return abs(OwnBytes.between(figures, known).reserved) <= OWN_SHARE * known.reserved_bytes

    def set_own(self, number: int, figures: Figures, by_search: Figures | None = None) -> None:
        """What this GPU itself takes; `by_search` is the same simulation by the policy that the search judges
        by, for bytes that may not be the GPU's own. Those that share the passes take as much more."""
        judged, passes = self.state.judged, self.state.passes_of(number)
        known = judged[number]
        more = OwnBytes.between(figures, known)
        as_long = math.isclose(figures.seconds, known.seconds, rel_tol=SAME_SECONDS)
        is_own = self.may_be_own(number, figures) if by_search is None else self._is_found(number, by_search)
        self.own[number] = as_long and is_own
        judged[number] = figures
        if self.own[number] and passes not in self._more:
            self._more[passes] = more
            for other in set(self.state.siblings(number)).difference(self.own):
                judged[other] = more.added_to(judged[other])
        self._open = (-1, [])

    def _is_found(self, number: int, by_search: Figures) -> bool:
        """Whether these are the bytes that the search found for this candidate."""
        more = self._more.get(self.state.passes_of(number))
        as_own = more.added_to(by_search) if more else by_search
        return as_own[:3] == self.state.judged[number][:3]

    def exclude(self, numbers: Collection[int]) -> None:
        """These cannot be judged."""
        for number in numbers:
            self.state.bounds.pop(number, None)
        self.sort()

    def fits(self, number: int) -> bool:
        """Whether a candidate that was judged fits and leaves the headroom, or may do so by this GPU's own
        policy."""
        share = min(self._less_share, self._unknown_share(number))
        return self.state.judged[number].needed_bytes * (1 - share) <= self._bound

    def _may_fit(self, needed: int) -> bool:
        return needed * (1 - self._less_share) <= self._bound

    def _unknown_share(self, number: int) -> float:
        """Of the bytes that a candidate was judged to take, how many may be this GPU's own scratch."""
        if number in self.own:
            return 0.0
        more = self._more.get(self.state.passes_of(number))
        if more is None:
            return OWN_SHARE
        return SIBLING_SHARE if any(more) else 0.0

    def _fitting(self) -> list[int]:
        return [number for number in self.state.judged if self.fits(number)]

    def _fastest(self) -> int | None:
        """The fastest of those judged that fit; None where the smallest is looked for."""
        fitting = [] if self.smallest else self._fitting()
        if not fitting:
            return None
        return self._first(fitting, lambda figures: (figures.seconds, figures.needed_bytes))

    def _surely_fits(self, number: int) -> bool:
        """Whether a candidate fits whatever this GPU's own workspaces and scratch are."""
        return self.state.judged[number].needed_bytes * (1 + self._unknown_share(number)) <= self._bound

    def _first(self, numbers: Sequence[int], order: Callable[[Figures], tuple[float, float]]) -> int:
        """The first in this order, and among equals the one that any plan would take."""
        judged = self.state.judged
        best = min(order(judged[number]) for number in numbers)
        return min((number for number in numbers if order(judged[number]) == best), key=self.state.rank)

    def _near_bytes(self) -> float:
        """What a nearest miss may take; 0 where the smallest may fit, or is what is asked for."""
        least = self.state.smallest
        missed = not self.smallest and least * (1 - self._less_share) > (self.gpu.memory_bytes or 0)
        return least * (1 + NEARLY_AS_SMALL) if missed else 0.0

    def _near(self) -> list[int]:
        most = self._near_bytes()
        return [number for number, figures in self.state.judged.items() if figures.needed_bytes <= most]

    def _faster_near(self) -> Iterator[int]:
        """What may be faster than the nearest miss of now, and was not judged."""
        most = self._near_bytes()
        enough = min((self.state.judged[number].seconds for number in self._near()), default=0.0)
        for number in self._by_seconds:
            least = self.state.bounds[number]
            if least.seconds > enough * (1 - NEARLY_AS_SMALL):
                return
            if number in self.state.judged or least.needed_bytes > most:
                continue
            if not self.state.has_better_sibling(number, lambda number: self._is_as_small(number, most)):
                yield number

    def _faster(self) -> Iterator[int]:
        enough = min((self.state.judged[number].seconds for number in self._fitting()), default=None)
        for number in self._by_seconds:
            least = self.state.bounds[number]
            is_slower = enough is not None and least.seconds * (1 - TIME_BOUND_MARGIN) > enough
            if is_slower or least.seconds > self._held_above:
                return
            if number in self.state.judged or not self._may_fit(least.needed_bytes):
                continue
            if not self.state.has_better_sibling(number, self.fits):
                yield number

    def _smaller(self) -> Iterator[int]:
        most = self.state.smallest * self._small_enough
        for number in self._by_bytes:
            if self.state.bounds[number].needed_bytes > most:
                return
            if number not in self.state.judged and not self._has_smaller_sibling(number):
                yield number

    def _has_smaller_sibling(self, number: int) -> bool:
        """Whether a sibling was judged that is as small by its lower bound; where the smallest is asked for,
        that is not enough."""
        bounds = self.state.bounds
        needed = [bounds[other].needed_bytes for other in self.state.siblings(number)]
        return not self.smallest and min(needed, default=math.inf) <= bounds[number].needed_bytes

    def _is_as_small(self, number: int, most: float) -> bool:
        return self.state.judged[number].needed_bytes <= most


def screen_recomputing(recomputing: RecomputingKinds, searches: Sequence[PerGpuSearch]) -> bool:
    """Gives kinds that recompute their lower bounds, as far as a GPU may have a better answer among them, or
    a simpler one. Where there are none, nothing is held back any more, and GPUs that nothing fits look for
    the smallest. Whether there is more to judge."""
    hopeful = [search.is_hopeful() for search in searches]

    def is_needed(number: int, least: OnGpus) -> bool:
        return any(may_be_better(bound) for may_be_better, bound in zip(hopeful, least, strict=True))

    screened = recomputing.screen(is_needed, KINDS_AT_A_TIME, twins=False)
    if screened:
        for search in searches:
            search.hold_back(recomputing)
    else:
        sought = sum(search.seeks_smallest for search in searches)
        more = [search.release() or search.seek_smallest() for search in searches]
        if sum(search.seeks_smallest for search in searches) > sought:
            recomputing.screen_smallest()
            for search in searches:
                search.sort()
        if any(more):
            return True
    if not screened and searches[0].state.judged:
        as_fast = [search.may_be_simpler() for search in searches]
        screened = recomputing.screen(lambda n, least: any(may(n, least[i]) for i, may in enumerate(as_fast)))
    for search in searches:
        search.sort()
    return bool(screened)
