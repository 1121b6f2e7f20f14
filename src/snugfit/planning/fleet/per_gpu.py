"""State of one GPU in a search that several GPUs share: its open candidates and its answer.

Each GPU needs one recipe only, the fastest that fits or the smallest, and not a whole front. A candidate
is evaluated while it could still be that recipe. It must possibly fit, and its lower bound in seconds must
not exceed those of the best known recipe that fits. If nothing can fit, the smallest is searched instead.

GPUs that share a search run the same kernels, with separate workspaces and scratch. The search uses the
policy of the GPU that takes least. If another GPU may take less, a candidate that nearly fits counts as
fitting. The answer is then simulated in full by the GPU's own policy (`Parts.whole`). If it then does not
fit, the search continues with the next one. Recipes that share their passes have the same workspaces and
scratch. The additional bytes that the simulation finds for one of them hold for all. If the difference is
very large, the answer is also simulated by the search's policy. The result must match the search.

The smallest recipe is exact if it is requested. If nothing fits, the nearest miss is the smallest up to
`NEARLY_AS_SMALL`, and the fastest of the candidates within that limit. These include spans of layers that
may be the smallest.

Recipes that share their passes and differ in the update are siblings. A sibling is skipped if its lower
bound is no faster than an evaluated one that fits. If none fits, it is skipped if it is no smaller.
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
"""Greatest relative difference between sums of the same kernels in different orders."""

HELD_BACK = 2.0
"""Factor on the seconds of the fastest unscreened kind without its recomputing, above which recipes wait
(chosen).

Recomputing takes a third more.
"""


class PerGpuSearch:
    """State of one GPU in a search that several share; `index` is its position among them.

    `takes_less` is True if it may take less scratch than the GPU whose policy evaluates candidates.
    """

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
        """True if the smallest recipe is searched: it is requested, or nothing can fit."""
        self._small_enough = 1.0 if smallest else 1 - NEARLY_AS_SMALL
        """Factor on the smallest bytes below which a candidate is still searched."""
        self._bound = (gpu.memory_bytes or 0) - headroom_bytes
        self.own: dict[int, bool] = {}
        """Candidates that were simulated in full by this GPU's own policy, with True if the search's figures
        matched."""
        self._more: dict[Hashable, OwnBytes] = {}
        """Additional bytes by passes, from the first candidate with these passes that was simulated in
        full."""
        self._held_above = math.inf
        """Seconds above which no candidate is evaluated for now."""
        self.sort()

    def sort(self) -> None:
        """Sort the candidates by the state's lower bounds; call it after every change of these."""
        bounds = self.state.bounds
        self._by_seconds = [number for *_, number in sorted((b[1], b[0], n) for n, b in bounds.items())]
        self._by_bytes = sorted(bounds, key=bounds.__getitem__)
        self._open: tuple[int, list[int]] = (-1, [])

    def hold_back(self, recomputing: RecomputingKinds) -> None:
        """Postpone candidates that are much slower than the lower bounds of unscreened kinds."""
        self._held_above = HELD_BACK * recomputing.least_seconds(self.index, self._may_fit)
        self._open = (-1, [])

    def release(self) -> bool:
        """Stop postponing candidates. Return whether this opens any."""
        held, self._held_above, self._open = self._held_above, math.inf, (-1, [])
        return held < math.inf and any(self.open_candidates())

    def open_candidates(self) -> Iterable[int]:
        """Return candidates that could be better than the current answer and were not evaluated, the best
        first."""
        judged = len(self.state.judged)
        if self._open[0] != judged:  # the list only changes with the number of evaluated candidates
            self._open = judged, list(self._open_candidates())
        return self._open[1]

    def is_hopeful(self) -> Callable[[Bound], bool]:
        """Return a predicate of a lower bound: True if such a candidate could be better than the current
        answer."""
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
        """Return a predicate of a candidate and its lower bound: True if it could be a simpler answer.

        It is always False if nothing fits, or if the smallest recipe is requested.
        """
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
        """Search for the smallest recipe from now on if nothing fits. Return whether this is new."""
        did_not = not self.seeks_smallest and not self._fitting()
        if did_not:
            self.seeks_smallest, self._open = True, (-1, [])
        return did_not

    def learn(self, number: int, figures: Figures) -> None:
        """Store a candidate's figures by the policy of the search."""
        self.state.learn(number, figures)
        if more := self._more.get(self.state.passes_of(number)):
            self.state.judged[number] = more.added_to(figures)

    def answer(self) -> int:
        """Return the best evaluated candidate, and the simplest among equals.

        If none leaves the headroom, return the smallest that fits. If none fits, return the fastest that
        is nearly as small as the smallest.
        """
        fastest = self._fastest()
        if fastest is not None:
            return simplest(self.state, fastest, self.fits) if self._surely_fits(fastest) else fastest
        if near := self._near():
            return self._first(near, lambda figures: (figures.seconds, figures.needed_bytes))
        judged = list(self.state.judged)
        return self._first(judged, lambda figures: (figures.needed_bytes, figures.seconds))

    def may_be_own(self, number: int, figures: Figures) -> bool:
        """Return whether workspaces and scratch alone may explain the difference from the known bytes."""
        known = self.state.judged[number]
        return abs(OwnBytes.between(figures, known).reserved) <= OWN_SHARE * known.reserved_bytes

    def set_own(self, number: int, figures: Figures, by_search: Figures | None = None) -> None:
        """Store this GPU's own figures of a candidate. Candidates with the same passes get the same
        additional bytes.

        `by_search` is the same simulation by the policy of the search, given if the difference may not be
        the GPU's own.
        """
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
        """Return whether these bytes match the search's figures for this candidate."""
        more = self._more.get(self.state.passes_of(number))
        as_own = more.added_to(by_search) if more else by_search
        return as_own[:3] == self.state.judged[number][:3]

    def exclude(self, numbers: Collection[int]) -> None:
        """Exclude candidates that cannot be simulated."""
        for number in numbers:
            self.state.bounds.pop(number, None)
        self.sort()

    def fits(self, number: int) -> bool:
        """Return whether an evaluated candidate fits with the headroom, or may fit by this GPU's own
        policy."""
        share = min(self._less_share, self._unknown_share(number))
        return self.state.judged[number].needed_bytes * (1 - share) <= self._bound

    def _may_fit(self, needed: int) -> bool:
        return needed * (1 - self._less_share) <= self._bound

    def _unknown_share(self, number: int) -> float:
        """Return the greatest share of a candidate's bytes that may be this GPU's own scratch."""
        if number in self.own:
            return 0.0
        more = self._more.get(self.state.passes_of(number))
        if more is None:
            return OWN_SHARE
        return SIBLING_SHARE if any(more) else 0.0

    def _fitting(self) -> list[int]:
        return [number for number in self.state.judged if self.fits(number)]

    def _fastest(self) -> int | None:
        """Return the fastest evaluated candidate that fits; None in a search for the smallest."""
        fitting = [] if self.smallest else self._fitting()
        if not fitting:
            return None
        return self._first(fitting, lambda figures: (figures.seconds, figures.needed_bytes))

    def _surely_fits(self, number: int) -> bool:
        """Return whether a candidate fits for any workspaces and scratch of this GPU."""
        return self.state.judged[number].needed_bytes * (1 + self._unknown_share(number)) <= self._bound

    def _first(self, numbers: Sequence[int], order: Callable[[Figures], tuple[float, float]]) -> int:
        """Return the first candidate in this order, and among equals the one of every plan."""
        judged = self.state.judged
        best = min(order(judged[number]) for number in numbers)
        return min((number for number in numbers if order(judged[number]) == best), key=self.state.rank)

    def _near_bytes(self) -> float:
        """Return the greatest bytes of a nearest miss; 0 if the smallest may fit or is requested."""
        least = self.state.smallest
        missed = not self.smallest and least * (1 - self._less_share) > (self.gpu.memory_bytes or 0)
        return least * (1 + NEARLY_AS_SMALL) if missed else 0.0

    def _near(self) -> list[int]:
        most = self._near_bytes()
        return [number for number, figures in self.state.judged.items() if figures.needed_bytes <= most]

    def _faster_near(self) -> Iterator[int]:
        """Yield candidates that may be faster than the current nearest miss and were not evaluated."""
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
        """Return whether an evaluated sibling is as small by its lower bound.

        Always False if the smallest recipe is requested, since that is then not enough.
        """
        bounds = self.state.bounds
        needed = [bounds[other].needed_bytes for other in self.state.siblings(number)]
        return not self.smallest and min(needed, default=math.inf) <= bounds[number].needed_bytes

    def _is_as_small(self, number: int, most: float) -> bool:
        return self.state.judged[number].needed_bytes <= most


def screen_recomputing(recomputing: RecomputingKinds, searches: Sequence[PerGpuSearch]) -> bool:
    """Compute lower bounds of recomputing kinds that may contain a better or a simpler answer for a GPU.

    If there are none, evaluate postponed candidates, and search for the smallest recipe on GPUs without a
    fitting one. Return whether there are candidates to evaluate.
    """
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
