"""Search for a smaller recipe for a run on several GPUs after memory ran out.

All GPUs wait for it, so it does not search for the fastest of all (`search.py`). Candidates are evaluated
on few layers, in the order of increasing cost:

    1. the broken recipe with its batch cut finer. Its bytes are on a line between the batch as it was and
       single samples. The line gives the fewest micro-batches that may fit, and these are evaluated
    2. each other technique that recomputes activations, first with the largest micro-batches. This step is
       skipped unless the first result takes more than `ENOUGH` times as long as the broken one. A technique
       that is slower even then than a known fitting recipe is dropped. For each other one the largest
       micro-batches that fit are searched

Only the broken recipe and the answer are simulated with all layers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from snugfit.errors import SnugfitError
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.planning.keep import Kept
from snugfit.planning.several_gpus.asking import MARGIN
from snugfit.planning.several_gpus.candidates import Shared, cuts, recomputings
from snugfit.planning.several_gpus.fastest import size_of
from snugfit.planning.several_gpus.judge import Judge, Judged, modules_of
from snugfit.prediction.headroom import at_most
from snugfit.prediction.worker_pool import Question, WorkerPool, is_picklable, worker_pool
from snugfit.step.applier import engine_of
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import on_gpus
from snugfit.techniques.technique import Slot, Technique

ENOUGH = 1.1
"""Factor on the seconds of the broken step (chosen), within which a recipe is accepted without a search for
faster ones. Such a search costs as much as some hundred steps gain."""

MOST_IN_FULL = 3
"""Greatest number of answers that are simulated with all layers (chosen), if the first ones do not fit."""

MOST_WORKERS = 4
"""Greatest number of processes that simulate concurrently (chosen), one for each question in one call."""


def smaller_on_several(
    job: Job, recipe: Recipe, *, gpu: Gpu, gpus: int, searched: Collection[Slot], share: float
) -> Recipe | None:
    """Return a recipe that needs at most this `share` of this one's predicted bytes on so many GPUs, or None.

    It also fits each GPU. Slots in `searched` may change, among those of recomputation and of the cut of
    the batch. The global batch stays the same. Other processes simulate. Raises `SnugfitError` if the
    recipe cannot be simulated.
    """
    setup = on_gpus(recipe.setup(), gpus)
    if gpus == 1 or engine_of(setup) is not None:
        return None
    make = partial(Judge, job, gpu)
    if not is_picklable(make):
        raise SnugfitError("A model that was made in Python cannot be sent to the processes that simulate.")
    slots = {slot: (recipe[slot],) for slot in Slot if slot not in searched}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = max(2, min(MOST_WORKERS, cores))
    with worker_pool(make, workers=workers, preload=modules_of(job)) as pool:
        return _Smaller(job, recipe, gpus, Kept(slots=slots, several_gpus=True), pool).find(gpu, share)


@dataclass
class _Recomputation:
    """One technique that recomputes activations, with all cuts of the batch, from large micro-batches to
    small ones."""

    recipes: list[Recipe]
    samples: list[int]
    """Samples of a micro-batch on one GPU."""
    known: dict[int, Judged] = field(default_factory=dict)
    """Figures of the simulated cuts, by their indices."""

    @property
    def least_seconds(self) -> float:
        """Lower bound of a step in seconds: a finer cut takes no less."""
        return min((judged.step_seconds for judged in self.known.values()), default=0.0)


class _Smaller:
    """One search for a recipe that needs less."""

    def __init__(self, job: Job, recipe: Recipe, gpus: int, fixed: Kept, pool: WorkerPool) -> None:
        self._job, self._broken, self._gpus = job, recipe, gpus
        self._fixed, self._pool = fixed, pool
        self._as_it_is = _Recomputation([recipe], [self._size(recipe[Slot.BATCHING])])
        self._own = self._way(recipe[Slot.CHECKPOINTING], finer=True)
        self._others: list[_Recomputation] | None = None
        self._bound, self._margin = 0, MARGIN
        self._points: list[tuple[int, float]] = []
        """Samples of a micro-batch and bytes, of the broken recipe's finest cut and of itself."""

    def find(self, gpu: Gpu, share: float) -> Recipe | None:
        """Return the recipe for the rest of the run."""
        finest = [(self._own, len(self._own.recipes) - 1)] if self._own.recipes else []
        needed = self._ask((self._as_it_is, 0), *finest, in_full=self._broken)
        if not self._as_it_is.known:
            return None
        self._bound = at_most(share * needed, gpu)
        self._points = [
            (way.samples[at], judged.needed_bytes)
            for way in (self._own, self._as_it_is)
            for at, judged in way.known.items()
        ]
        self._learn(needed, self._points[-1][1])
        for _ in range(MOST_IN_FULL):
            if (best := self._best()) is None:
                return None
            way, at = best
            if (needed := self._ask(in_full=way.recipes[at])) <= self._bound:
                return way.recipes[at]
            self._learn(needed, way.known[at].needed_bytes)
        return None

    def _learn(self, in_full: int, on_few_layers: float) -> None:
        """Increase the margin if few layers underestimate the bytes, which then holds for other recipes
        too."""
        self._margin = max(self._margin, in_full / on_few_layers)

    def _best(self) -> tuple[_Recomputation, int] | None:
        """Return the fastest recipe that fits by few layers. Simulate until it is known, or fast enough."""
        best: tuple[_Recomputation, int] | None = None
        if (at := self._largest_that_fits(self._own, math.inf)) is not None:
            best = self._own, at
        if best is not None and _seconds(best) <= ENOUGH * self._as_it_is.least_seconds:
            return best
        for way in self._recomputing_otherwise():
            limit = math.inf if best is None else _seconds(best)
            at = self._largest_that_fits(way, limit)
            if at is not None and way.known[at].step_seconds < limit:
                best = way, at
        return best

    def _size(self, cut: Technique) -> int:
        return size_of(self._job, self._whole_batch(self._broken[Slot.CHECKPOINTING]), cut).samples

    def _whole_batch(self, recomputing: Technique) -> Shared:
        return Shared(self._gpus, self._broken.with_(recomputing).with_(roster.plain(Slot.BATCHING)))

    def _way(self, recomputing: Technique, *, finer: bool = False) -> _Recomputation:
        """Return one technique with every cut of the batch, or with those that are `finer` than the broken
        one's."""
        shared, most = self._whole_batch(recomputing), self._size(self._broken[Slot.BATCHING])
        pieces = [
            (one, size_of(self._job, shared, one).samples) for one in cuts(self._job, shared, self._fixed)
        ]
        some = [(shared.cut(one), samples) for one, samples in pieces if not finer or samples < most]
        return _Recomputation([recipe for recipe, _ in some], [samples for _, samples in some])

    def _recomputing_otherwise(self) -> list[_Recomputation]:
        """Return other techniques that recompute activations, the possibly fastest first."""
        if self._others is None:
            own = self._broken[Slot.CHECKPOINTING]
            every = (self._way(one) for one in recomputings(self._job, self._fixed) if one != own)
            ways = [way for way in every if way.recipes]
            self._ask(*((way, 0) for way in ways))
            self._others = sorted((way for way in ways if way.known), key=lambda one: one.least_seconds)
        return self._others

    def _largest_that_fits(self, way: _Recomputation, limit: float) -> int | None:
        """Return the index of the largest micro-batches that fit. Simulate while a step may take less than
        `limit` seconds."""
        while way.least_seconds < limit and (at := self._next(way)) is not None:
            self._ask((way, at))
            if at not in way.known:  # it cannot be simulated
                return None
        return next((at for at in sorted(way.known) if self._fits(way.known[at].needed_bytes)), None)

    def _next(self, way: _Recomputation) -> int | None:
        """Return the index of the next cut, the largest micro-batches that may fit; None if those are
        known."""
        fitting = [at for at, judged in way.known.items() if self._fits(judged.needed_bytes)]
        missing = [at for at in way.known if at not in fitting]
        unknown = range(max(missing, default=-1) + 1, min(fitting, default=len(way.recipes)))
        expected = (at for at in unknown if self._fits(self._expected_bytes(way, way.samples[at])))
        return next(expected, None if fitting or not unknown else unknown[-1])

    def _fits(self, needed_bytes: float) -> bool:
        return needed_bytes * self._margin <= self._bound

    def _expected_bytes(self, way: _Recomputation, samples: int) -> float:
        """Return bytes on the straight lines between the known ones: with no samples all ways take the
        same."""
        (few, fewest), (many, most) = self._points[0], self._points[-1]
        slope = (most - fewest) / (many - few) if many > few else 0.0
        points = [(0, fewest - slope * few)]
        points += sorted((way.samples[at], judged.needed_bytes) for at, judged in way.known.items())
        if points[-1][0] < samples:
            points.append(self._points[-1])
        for (before, low), (after, high) in pairwise(points):
            if before <= samples <= after:
                return low + (high - low) * (samples - before) / (after - before)
        return points[-1][1]

    def _ask(self, *judged: tuple[_Recomputation, int], in_full: Recipe | None = None) -> int:
        """Simulate these on few layers, and one recipe in full. Return the bytes that the latter needs.

        Raises `SnugfitError` if it cannot be simulated.
        """
        needed = 0
        for answer in self._pool.answers_to(list(self._questions(judged, in_full))):
            if answer.number < 0:
                if isinstance(answer.value, SnugfitError):
                    raise answer.value
                needed = answer.value.needed_bytes
            elif not answer.value.why_not:
                way, at = judged[answer.number]
                way.known[at] = answer.value
        return needed

    def _questions(
        self, judged: Sequence[tuple[_Recomputation, int]], in_full: Recipe | None
    ) -> Iterator[Question]:
        if in_full is not None:
            yield Question(-1, "in_full", (self._gpus, in_full))
        for number, (way, at) in enumerate(judged):
            yield Question(number, "judge", (self._gpus, way.recipes[at]))


def _seconds(one: tuple[_Recomputation, int]) -> float:
    way, at = one
    return way.known[at].step_seconds
