"""Search for the fastest recipe on one number of GPUs, over parallelism layouts and numbers of micro-batches.

Layouts are simulated in the order of their lower bounds in seconds, if known (`evidence.py`). Layouts that
cannot be faster than the best fitting one are skipped. For each layout the search finds the fewest
micro-batches with which it fits: fewer take less time and more memory. With pipeline stages that is not true,
because GPUs wait longer for each other with fewer micro-batches. Each number of micro-batches is then a
separate layout. While no layout is known to fit, those that need the least memory are simulated first. If
they clearly do not fit, no other layout does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from snugfit.features.distributed.plan.candidates import cuts
from snugfit.features.distributed.plan.evidence import CutStep, Evidence
from snugfit.features.distributed.plan.judge import Judged
from snugfit.features.distributed.plan.shared import Shared
from snugfit.job.job import Job
from snugfit.planning.keep import Kept
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import job_of_rank
from snugfit.techniques.technique import Technique

Judging = Callable[[Sequence[tuple[int, Recipe]]], list[Judged]]
"""The type of a function that simulates pairs of a number of GPUs and a recipe, on models of few layers. It
returns their bytes and seconds.
"""

AT_ONCE = 2
"""Number of recipes that are simulated concurrently (chosen). One result may make other simulations
unnecessary.
"""


class Screened(NamedTuple):
    """A recipe for several GPUs with predicted bytes and seconds, extrapolated from models of few layers."""

    recipe: Recipe
    judged: Judged
    shared: Shared
    """The parallelism layout of the recipe, without its number of micro-batches."""
    size: CutStep


class Outcome(NamedTuple):
    """Result of the search on one number of GPUs: the recipes that fit, or the one that exceeds the memory
    least.
    """

    fitting: list[Screened]
    """Recipes that fit, the fastest first. Each tried parallelism layout has one."""
    miss: Screened | None
    """The simulated recipe that needs the least memory, if none fits."""
    does_any_fit: bool = False
    """True if any recipe is known to fit, regardless of its seconds."""
    alone_seconds: float | None = None
    """Lower bound of a step's seconds with data parallelism alone; None if that does not fit."""


@dataclass
class _WayToShare:
    """A parallelism layout with recomputation, and its possible numbers of micro-batches, in
    ascending order.
    """

    shared: Shared
    pieces: list[Technique]
    sizes: list[CutStep]

    def recipe(self, at: int) -> Recipe:
        return self.shared.cut(self.pieces[at])


_Question = tuple[_WayToShare, int]
"""The type of a simulation to run: a parallelism layout, and the index of its number of micro-batches."""


class FastestOnGpus:
    """Search for the fastest recipe on one number of GPUs, over parallelism layouts and numbers of
    micro-batches.

    Layouts that cannot be simulated are added to `refused` with the reason, and are left out from then on.
    With `leanest_first`, layouts that need the least memory are simulated first until one fits. With
    `trusts_line`, a number of micro-batches is not simulated if linear extrapolation predicts that it does
    not fit.
    """

    def __init__(
        self,
        job: Job,
        gpus: int,
        every: Iterable[Shared],
        fixed: Kept,
        evidence: Evidence,
        refused: MutableMapping[str, str],
        judge: Judging,
        *,
        leanest_first: bool = True,
        trusts_line: bool = False,
    ) -> None:
        self._trusts_line = trusts_line
        self._gpus, self._evidence, self._refused = gpus, evidence, refused
        self._judge = judge
        self._leanest_first = leanest_first
        self._ways = [
            way
            for shared in every
            # A layout that is refused without a mesh is refused with every mesh.
            if not {str(shared.recomputing), refusable(shared)} & {*refused}
            for way in _ways_to_cut(job, shared, fixed)
        ]

    def run(self, limit: float = math.inf) -> Outcome:
        """Return the recipes that fit in less than `limit` seconds a step, or the one that exceeds the memory
        least.

        Recipes are simulated until no other one can be faster than the first.
        """
        while asked := self._questions(limit):
            self._evaluate(asked)
        fitting = sorted(self._fitting(), key=lambda one: one.judged.step_seconds)
        if fitting or limit < math.inf:
            fast = [one for one in fitting if one.judged.step_seconds < limit]
            return Outcome(fast, None, self._is_any_known_to_fit())
        return Outcome([], self.nearest_miss())

    def does_any_fit(self) -> bool:
        """Return True if any recipe fits these GPUs. It simulates the layouts that recompute most and take
        the least memory, with the smallest micro-batches.
        """
        simulated = False
        while not self._is_any_known_to_fit():
            left = [way for way in self._ways if self._evidence.fits(way.shared, way.sizes[-1]) is None]
            if simulated or not left:
                return False
            # Layouts are sorted by recomputation, so the last one recomputes most.
            most = [way for way in left if way.shared.recomputing == left[-1].shared.recomputing]
            asked = self._holding_least(most)
            self._evaluate(asked)
            # Layouts that cannot be simulated have no figures. The next ones are then tried.
            simulated = any(self._evidence.judgment(way.shared, way.sizes[at]) for way, at in asked)
        return True

    def _is_any_known_to_fit(self) -> bool:
        return any(self._smallest_that_fits(way) is not None for way in self._ways)

    def _evaluate(self, asked: Sequence[_Question]) -> None:
        judged = self._judge([(self._gpus, way.recipe(at)) for way, at in asked])
        for (way, at), answer in zip(asked, judged, strict=True):
            self._store(way, at, answer)

    def _store(self, way: _WayToShare, at: int, judged: Judged) -> None:
        if judged.why_not:
            what = refusable(way.shared)
            self._refused[what] = judged.why_not
            self._ways = [one for one in self._ways if refusable(one.shared) != what]
            return
        self._evidence.hear(way.shared, way.sizes[at], judged)

    def _fitting(self) -> Iterator[Screened]:
        for way in self._ways:
            for at, size in enumerate(way.sizes):
                judged = self._evidence.judgment(way.shared, size)
                if judged is not None and self._evidence.does_fit(judged):
                    yield Screened(way.recipe(at), judged, way.shared, size)
                    # More micro-batches of this layout take more time.
                    break

    # ---- requests ------------------------------------------------------------------------------------------

    def _questions(self, limit: float) -> list[_Question]:
        """Return the recipes to simulate next: parallelism layouts, each with the index of a number of
        micro-batches. The list is empty once the fastest recipe is known.
        """
        best = min([limit, *(one.judged.step_seconds for one in self._fitting())])
        by_least: dict[float, list[_Question]] = {}
        is_anything_known = best < limit or not self._leanest_first
        is_anything_known = is_anything_known or self._is_any_known_to_fit()
        for way in self._ways:
            if is_anything_known and self._waits_for_smaller_groups(way, best):
                continue
            if (next_one := self._open(way, best)) is not None:
                least, at = next_one
                by_least.setdefault(least, []).append((way, at))
        asked = [one for least in sorted(by_least) for one in by_least[least]]
        return (asked if is_anything_known else self._leanest(asked))[:AT_ONCE]

    def _open(self, way: _WayToShare, best: float) -> tuple[float, int] | None:
        """Return a layout's lower bound of a step's seconds, and the index of the number of micro-batches to
        simulate next.

        Return None if the layout need not be simulated.
        """
        first = self._first(way)
        if first is None or self._is_behind(way):
            return None
        least = self._evidence.least_seconds(way.shared, way.sizes[first])
        at = self._next(way, first) if least < best else None
        return None if at is None else (least, at)

    def _first(self, way: _WayToShare) -> int | None:
        """Return the index of this layout's fewest micro-batches that are not known to exceed memory."""
        fits = self._evidence.fits
        return next((at for at, size in enumerate(way.sizes) if fits(way.shared, size) is not False), None)

    def _smallest_that_fits(self, way: _WayToShare) -> int | None:
        """Return the index of this layout's fewest micro-batches that are known to fit into memory."""
        fits = self._evidence.fits
        return next((at for at, size in enumerate(way.sizes) if fits(way.shared, size)), None)

    def _next(self, way: _WayToShare, first: int) -> int | None:
        """Return the index of the number of micro-batches to simulate next; None if the fewest that fit into
        memory are known.
        """
        fitting, last = self._smallest_that_fits(way), len(way.sizes) - 1
        if fitting is None:
            # If the fewest micro-batches do not fit, the smallest ones show first if any number fits.
            was_asked = self._evidence.judgment(way.shared, way.sizes[last]) is not None
            return last if first > 0 and not was_asked else first
        # A number of micro-batches that fits by its bounds alone has no seconds yet, so it is simulated.
        if fitting == first or self._evidence.judgment(way.shared, way.sizes[fitting]) is None:
            is_known = self._evidence.judgment(way.shared, way.sizes[first]) is not None
            return None if is_known else fitting
        near = way.sizes[fitting]
        unknown = [
            at for at in range(first, fitting) if self._evidence.fits(way.shared, way.sizes[at]) is None
        ]
        expected = (at for at in unknown if self._evidence.expects_to_fit(way.shared, way.sizes[at], near))
        return next(expected, None if self._trusts_line else unknown[-1])

    def _is_behind(self, way: _WayToShare) -> bool:
        """Return True if another layout is faster than this one, or must be simulated before it.

        The other layout has the same parallelism, and recomputes less or gathers weights less often. It fits,
        or may fit, with one micro-batch per step.
        """
        for other in self._ways:
            if other is way:
                break
            # With stages, each number of micro-batches is a separate layout, and only equal numbers can be
            # compared.
            if way.shared.stages > 1 and way.sizes != other.sizes:
                continue
            if not way.shared.is_slower_than(other.shared):
                continue
            if self._evidence.fits(other.shared, other.sizes[0]) is not False:
                return True
        return False

    def _waits_for_smaller_groups(self, way: _WayToShare, best: float) -> bool:
        """Return True if this layout need not be simulated yet: the same layout with groups of half as many
        GPUs comes first. It is also True if those groups are no faster than still smaller ones.
        """
        if way.shared.parts == 1:
            return False
        for other in self._ways:
            is_half = way.shared.parts == 2 * other.shared.parts
            if not is_half or not self._evidence.is_wider(way.shared, other.shared):
                continue
            if self._open(other, best) is not None or self._waits_for_smaller_groups(other, best):
                return True
            seconds = self._evidence.fastest_known(other.shared, self._gpus)
            smaller = [
                self._evidence.fastest_known(one, self._gpus)
                for one in self._evidence.in_half_groups(other.shared)
            ]
            if seconds is not None and any(one is not None and one <= seconds for one in smaller):
                return True
        return False

    def _leanest(self, asked: list[_Question]) -> list[_Question]:
        """Return the recipes to simulate next as long as none is known to fit, those with the least memory
        first.

        For meshes they are all layouts that no other layout undercuts in memory, each with its smallest
        micro-batches.
        """
        if any(way.shared.parts == 1 for way in self._ways):
            return sorted(asked, key=lambda one: -self._held_more(one[0]))
        left = [way for way in self._ways if self._evidence.fits(way.shared, way.sizes[-1]) is None]
        return self._holding_least(left) or asked

    def _holding_least(self, ways: Sequence[_WayToShare]) -> list[_Question]:
        """Return these layouts without those that take more memory than another, each with its smallest
        micro-batches.
        """
        return [
            (way, len(way.sizes) - 1)
            for at, way in enumerate(ways)
            if not any(
                # The earlier one of two layouts that need the same memory stays.
                self._is_leaner(other, way) and not (index > at and self._is_leaner(way, other))
                for index, other in enumerate(ways)
                if index != at
            )
        ]

    def _is_leaner(self, one: _WayToShare, other: _WayToShare) -> bool:
        """Return True if one layout takes no more memory than the other, both with their smallest
        micro-batches.
        """
        alike = one.shared.key == other.shared.key or self._evidence.holds_no_more(one.shared, other.shared)
        return alike and one.sizes[-1].samples <= other.sizes[-1].samples

    def _held_more(self, way: _WayToShare) -> int:
        """Return the number of other layouts that take no less memory than this one."""
        return sum(self._evidence.holds_no_more(way.shared, other.shared) for other in self._ways)

    def nearest_miss(self) -> Screened | None:
        """Return the simulated recipe with the fewest bytes. Without one, simulate a recipe that needs little
        memory.
        """
        if self._ways and not any(True for _ in self._misses()):
            # `max` returns the first of equal elements, which recomputes most in this order.
            leanest = max(reversed(self._ways), key=self._held_more)
            self._evaluate([(leanest, len(leanest.sizes) - 1)])
        return smaller_miss(*self._misses())

    def _misses(self) -> Iterator[Screened]:
        for way in self._ways:
            for at, size in enumerate(way.sizes):
                if (judged := self._evidence.judgment(way.shared, size)) is not None:
                    yield Screened(way.recipe(at), judged, way.shared, size)


def smaller_miss(*misses: Screened | None) -> Screened | None:
    """Return the recipe with the fewest bytes among these, which do not fit; None without any."""
    every = (one for one in misses if one is not None)
    return min(every, key=lambda one: one.judged.needed_bytes, default=None)


def refusable(shared: Shared) -> str:
    """Return a layout's recomputation and mesh techniques as text. If one layout cannot be simulated, all
    with the same text are skipped.
    """
    return " + ".join(filter(None, (str(shared.recomputing), shared.mesh)))


def _ways_to_cut(job: Job, shared: Shared, fixed: Kept) -> Iterator[_WayToShare]:
    """Yield the layout with the list of its possible numbers of micro-batches. With pipeline stages, yield it
    once for each number instead.
    """
    pieces = cuts(job, shared, fixed)
    sizes = [size_of(job, shared, one) for one in pieces]
    if shared.stages == 1 and pieces:
        yield _WayToShare(shared, pieces, sizes)
    elif shared.stages > 1:
        yield from (_WayToShare(shared, [one], [size]) for one, size in zip(pieces, sizes, strict=True))


def size_of(job: Job, shared: Shared, pieces: Technique) -> CutStep:
    """Return the batch split of a layout with these micro-batches: number of GPUs, samples and number of
    micro-batches.
    """
    part = job_of_rank(job, shared.setup)
    count = pieces.alone.micro_batches
    return CutStep(shared.gpus, part.batch_size // count, count)
