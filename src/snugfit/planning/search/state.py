"""The state of a search: lower bounds of each candidate recipe, and exact bytes and seconds of the simulated
ones.

A candidate's lower bound in bytes counts allocated bytes. The allocator loses some per cent to fragmentation,
which only the replay of the whole step shows. Many candidates are as large as a faster one except for that
loss. A search for slightly smaller ones would have to evaluate each of them, for little use. A candidate that
cannot be smaller than a faster one by `MEMORY_RESOLUTION` is therefore skipped. The best recipe is still
found: a candidate that may fit, if no faster one does, is always evaluated.

Recipes that share their forward and backward passes and differ in the update lose the same bytes to
fragmentation. Their seconds exceed the bounds by the same amount. They are therefore compared by their bounds
(`has_better_sibling`). If the update is a small share, one of the optimizers is evaluated.

With a memory limit, the Pareto front ends slightly above it: larger recipes do not fit, and take as long to
evaluate. If nothing fits, the front ends slightly above the smallest. It also ends at a multiple of the
seconds of the fastest recipe that fits. A slower recipe never makes a faster one unnecessary. The front
within that limit is thus the same as without it.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from snugfit.errors import SnugfitError
from snugfit.planning.cost.figures import BelowLowerBound, Bound, Figures
from snugfit.planning.plan import Choice, Counts, Exclusion
from snugfit.planning.search.progress import Progress, Tell
from snugfit.planning.search.space import Space
from snugfit.planning.step_key import launches_key
from snugfit.prediction.worker_pool import Question, WorkerPool
from snugfit.rehearsal.device.policy import PoliciesDiffer

TIME_BOUND_MARGIN = 0.001
"""Share by which a step's seconds may be less than their lower bound.

A linear extrapolation from two numbers of layers is a lower bound of a convex function. Seconds of a step are
convex in the number of layers, except at the step's ends.
"""

MEMORY_RESOLUTION = 0.03
"""Share of its bytes that a slower recipe must save to be listed.

It is approximately the share that the allocator loses to fragmentation.
"""

SPEED_RESOLUTION = 0.05
"""Share by which a recipe must be faster than a smaller one to be listed, if it cannot be the fastest
(chosen).
"""

NEGLIGIBLE_BYTES = 160 << 20
"""Least number of bytes that a slower recipe must save to be listed (chosen). Segments of the allocator and
workspaces of libraries cost a tiny model some 100 MiB that no lower bound contains."""

LOSS_SPREAD = 64 << 20
"""Largest assumed difference in bytes between the fragmentation of recipes with equal forward and backward
passes. It was 22 MiB at most in plans of Llama-3.1-8B with adapters.
"""

OVER_LIMIT_SHARE = 0.1
"""Share by which recipes of the Pareto front may exceed the memory limit. Such near misses need only slightly
more memory."""

SAMPLED = 50
"""Number of groups of recipes that are sampled to estimate the share that a search will skip."""


@dataclass
class SearchState:
    """State of a search: lower bounds of the candidate recipes by number, and exact bytes and seconds of the
    simulated ones.
    """

    space: Space
    bounds: dict[int, Bound] = field(default_factory=dict)
    """Lower bounds of bytes and seconds by recipe number, without recipes that cannot be simulated."""
    evaluated: dict[int, Figures] = field(default_factory=dict)
    """Exact bytes and seconds of the evaluated recipes, by number."""
    excluded: list[Exclusion] = field(default_factory=list)
    """Recipes that could not be simulated, each with the reason for its exclusion."""
    kinds: int = 0
    """Number of different forward and backward passes that were simulated for lower bounds."""
    memory_bytes: int | None = None
    """Largest bytes that the best recipe may need; None for no limit."""
    most_bytes: float = math.inf
    """Largest bytes of a recipe on the Pareto front of bytes and seconds. The default is `OVER_LIMIT_SHARE`
    above the memory limit.
    """
    negligible_bytes: int = 0
    """Least number of bytes, in addition to `MEMORY_RESOLUTION`, that a slower recipe must save to be
    listed."""
    beyond: float = OVER_LIMIT_SHARE
    """Share by which recipes of the Pareto front may exceed the smallest recipe's bytes if nothing fits."""
    nearly: float = 0.0
    """Tolerance, as a share of bytes and seconds, in the search for the recipe closest to fitting if nothing
    fits.
    """
    rehearses_whole: bool = False
    """True if one simulation gives both lower bounds and exact values of a recipe, so one worker computes
    both."""
    slowest: float = math.inf
    """Largest seconds per step of a recipe on the Pareto front, as a multiple of those of the fastest fitting
    recipe.
    """
    graded: set[int] = field(default_factory=set)
    """Identifiers of passes (`Candidate.sized`) for whose recipes the fewest recomputed layers were searched
    (`grades.py`).
    """
    screen_these: Callable[[Iterable[int], Callable[[Bound], bool]], None] = lambda numbers, is_needed: None
    """Function that computes lower bounds of the given postponed recipes. It skips those for whose estimates
    `is_needed` is False.
    """
    _best: list[tuple[float, int, int]] = field(default_factory=list)
    """Seconds, bytes and number of the evaluated recipes on the Pareto front, the fastest first."""
    _siblings: dict[tuple[int, bool, Hashable], list[int]] = field(
        default_factory=lambda: defaultdict(list), init=False
    )
    """Numbers of evaluated recipes by their passes with micro-batch size, kind of allocator segments, and use
    of CUDA graphs.
    """
    worker_of: dict[int, int] = field(default_factory=dict)
    """Index of the worker process that simulates a group of recipes, by the group's `Candidate.program`."""

    def __post_init__(self) -> None:
        if self.memory_bytes is not None:
            self.most_bytes = self.memory_bytes * (1 + OVER_LIMIT_SHARE)

    # ---- judging -----------------------------------------------------------------------------------------

    def evaluate(
        self,
        groups: Iterable[list[int]],
        pool: WorkerPool,
        *,
        skip: Callable[[int], bool] = lambda number: False,
        step: Callable[[bool], None] = lambda skips: None,
    ) -> None:
        """Simulate these groups of recipes in order, and store their exact bytes and seconds. Recipes of a
        group have the same trace. Recipes for which `skip` returns True are left out. `step` is called for
        each group, with True if all of it was skipped. All recipes that share their forward and backward
        passes go to one worker. Raises `BelowLowerBound`.
        """
        waiting = deque(groups)
        pending: dict[int, list[int]] = {}

        def next_call(worker: int) -> Question | None:
            set_aside: list[list[int]] = []
            question = None
            while waiting and question is None:
                group = [number for number in waiting.popleft() if not skip(number)]
                if group and not self.is_for(worker, group[0]):
                    set_aside.append(group)
                    continue
                step(not group)
                if group:
                    pending[group[0]] = group
                    setups = [self.space.candidates[number].setup for number in group]
                    question = Question(group[0], "evaluate", (setups,))
            # Groups for other workers return to the front, in their order.
            waiting.extendleft(reversed(set_aside))
            return question

        for answer in pool.results(next_call):
            self.store_group(pending.pop(answer.number), answer.value)

    def may_be_for(self, worker: int, number: int) -> bool:
        """Return False if another worker already simulates this recipe's layers or passes."""
        return self.worker_of.get(self.space.candidates[number].program, worker) == worker

    def is_for(self, worker: int, number: int) -> bool:
        """Return True if this worker simulates the recipe's passes, and assign them to it if no worker does.
        Another worker would have to simulate them again.
        """
        return self.worker_of.setdefault(self.space.candidates[number].program, worker) == worker

    def is_begun(self, number: int) -> bool:
        """Return True if some worker has simulated a recipe with the same compiled layers."""
        return self.space.candidates[number].program in self.worker_of

    def is_reserved(self, number: int) -> bool:
        """Return True if the worker that computes the recipe's lower bound should also evaluate it."""
        return self.rehearses_whole or self.space.candidates[number].setup.lowering is not None

    def must_be_lowered(self, number: int) -> bool:
        """Return True if the recipe has layers that no worker has compiled yet."""
        return self.space.candidates[number].setup.lowering is not None and not self.is_begun(number)

    def store_group(self, group: list[int], answer: Any) -> None:
        """Store the bytes and seconds of these recipes with one trace, or exclude them if the result is an
        error. Raises `BelowLowerBound`.
        """
        if isinstance(answer, SnugfitError):
            self.exclude(group, answer)
            return
        for number, (figures,) in zip(group, answer, strict=True):
            self.store(number, figures)

    def store(self, number: int, figures: Figures) -> None:
        """Store the exact bytes and seconds of a recipe. Raises `BelowLowerBound` if they are less than its
        lower bounds.
        """
        least, seconds, needed = self.bounds[number], figures.seconds, figures.needed_bytes
        if needed < least.needed_bytes or seconds < least.seconds * (1 - TIME_BOUND_MARGIN):
            raise BelowLowerBound
        self.evaluated[number] = figures
        self._siblings.setdefault(self.passes_of(number), []).append(number)
        self._rank_among_best(number)

    def correct(self, figures: Mapping[int, Figures]) -> None:
        """Replace the bytes and seconds of simulated recipes by those of full simulations."""
        self.evaluated |= figures
        self._best.clear()
        for number in self.evaluated:
            self._rank_among_best(number)

    def _rank_among_best(self, number: int) -> None:
        """Add an evaluated candidate to the Pareto front, unless another one dominates it."""
        seconds, needed = self.evaluated[number].seconds, self.evaluated[number].needed_bytes
        start = bisect.bisect_right(self._best, (seconds, needed, number))
        # Bytes decrease along this list, so only the next faster recipe can dominate.
        if start and self._best[start - 1][1] <= needed:
            return
        end = start
        while end < len(self._best) and self._best[end][1] >= needed:
            end += 1
        self._best[start:end] = [(seconds, needed, number)]

    def exclude(self, group: list[int], error: SnugfitError) -> None:
        """Exclude these recipes, which cannot be simulated, with the error as the reason."""
        self.excluded.append(exclusion(self.space, group, error))
        for number in group:
            self.bounds.pop(number, None)

    def evaluate_smallest(self, pool: WorkerPool, tell: Tell) -> None:
        """Simulate recipes that may need the least memory, those with the smallest lower bound first. Raises
        `BelowLowerBound`.
        """
        groups = self.by_trace(number for number in self.bounds if number not in self.evaluated)
        # The first two fields of a bound are bytes and seconds.
        groups.sort(key=lambda group: min(self.bounds[number][:2] for number in group))
        tell("checking")
        progress = Progress("checking", len(groups), tell)

        def step(skips: bool) -> None:
            left = [group[0] for group in groups[progress.done :: max(1, len(groups) // SAMPLED)]]
            due = sum(number in self.bounds and not self.cannot_be_smallest(number) for number in left)
            progress.step(skips, due / max(1, len(left)))

        self.evaluate(groups, pool, skip=self.cannot_be_smallest, step=step)

    # ---- selection of candidates --------------------------------------------------------------------------

    def by_trace(self, numbers: Iterable[int]) -> list[list[int]]:
        """Group these recipes by equal trace, each group at the position of its first recipe, and return the
        groups."""
        groups: dict[int, list[int]] = defaultdict(list)
        for number in numbers:
            groups[self.space.candidates[number].trace].append(number)
        return list(groups.values())

    def is_dominated(self, number: int, least: Bound | None = None) -> bool:
        """Return True if this recipe cannot be on the Pareto front: it is too large, too slow, or dominated.

        An evaluated recipe dominates it if that is as fast as this one's lower bound. This one must then not
        be smaller by `MEMORY_RESOLUTION`. A recipe that fits never counts as dominated by one that does not.
        A recipe that is slower than the fastest that fits is also dominated by recipes that are slower by up
        to `SPEED_RESOLUTION`. If its layers are not compiled yet, it always counts as dominated, unless the
        whole front is requested.
        """
        if least is None and self.has_better_sibling(number, self._stands_for(number)):
            return True
        least = least or self.bounds[number]
        least_seconds = least.seconds * (1 - TIME_BOUND_MARGIN)
        if least.needed_bytes > self.most_bytes or least_seconds > self.most_seconds:
            return True
        if least_seconds > self.fastest_that_fits:
            least_seconds *= 1 + SPEED_RESOLUTION
            # Compilation takes the longest, so other recipes than the best are compiled only for the whole
            # front.
            if self.slowest < math.inf and self.must_be_lowered(number):
                return True
        # With infinite bytes, candidates of equal seconds count as faster.
        faster = bisect.bisect_right(self._best, (least_seconds, math.inf, 0))
        if not faster:
            return False
        smallest = self._best[faster - 1][1]
        if self.memory_bytes is not None and least.needed_bytes <= self.memory_bytes < smallest:
            return False
        return self.worth_listing(smallest) <= least.needed_bytes

    def worth_listing(self, needed_bytes: int) -> float:
        """Return the bytes above which a slower recipe is not listed next to a faster one with
        `needed_bytes`."""
        return min(needed_bytes * (1 - MEMORY_RESOLUTION), needed_bytes - self.negligible_bytes)

    def has_better_sibling(self, number: int, stands: Callable[[int], bool]) -> bool:
        """Return True if a simulated recipe with the same passes is as fast as this one's lower bound and
        satisfies the predicate `stands`.
        """
        bounds, least = self.bounds, self.bounds[number].seconds
        return any(
            bounds[other].seconds <= least
            and self.evaluated[other].seconds * (1 - TIME_BOUND_MARGIN) <= least
            and stands(other)
            for other in self.siblings(number)
        )

    def siblings(self, number: int) -> list[int]:
        """Return the simulated recipes with the same forward and backward passes and the same allocator
        settings.
        """
        same_passes = self._siblings.get(self.passes_of(number), ())
        return [other for other in same_passes if other != number and other in self.bounds]

    def _stands_for(self, number: int) -> Callable[[int], bool]:
        """Return a predicate for simulated recipes. It is True if this recipe is not clearly smaller than the
        other, and does not fit unless the other does.
        """
        needed = self.bounds[number].needed_bytes

        def stands(other: int) -> bool:
            if self.worth_listing(self.bounds[other].needed_bytes) > needed:
                return False
            fits_too = self.fits(self._least_with_sibling(number, other))
            return self.fits(self.evaluated[other].needed_bytes) or not fits_too

        return stands

    def _least_with_sibling(self, number: int, sibling: int) -> int:
        """Return a lower bound of a recipe's bytes: its own, plus the fragmentation of a recipe with the same
        forward and backward passes.
        """
        least, known = self.bounds[number], self.bounds[sibling]
        # The fragmentation at a peak in the update depends on the optimizer, which siblings do not share.
        if any(bound.needed_bytes <= bound.resting_bytes for bound in (least, known)):
            return least.needed_bytes
        loss = self.evaluated[sibling].needed_bytes - known.needed_bytes
        return least.needed_bytes + max(0, loss - LOSS_SPREAD)

    def passes_of(self, number: int) -> tuple[int, bool, Hashable]:
        """Return a key of this recipe's forward and backward passes, allocator settings and use of CUDA
        graphs.
        """
        candidate = self.space.candidates[number]
        setup = candidate.setup
        return candidate.sized, setup.expandable_segments, launches_key(setup)

    def cannot_be_smallest(self, number: int) -> bool:
        """Return True if this recipe cannot be the smallest: it was simulated, or a simulated one is smaller
        than its lower bound. With `nearly`, a simulated recipe with the same passes and no larger lower bound
        is enough.
        """
        least = self.bounds[number].needed_bytes
        if number in self.evaluated or least > self.smallest * (1 - self.nearly):
            return True
        siblings = self.siblings(number) if self.nearly else []
        return any(self.bounds[sibling].needed_bytes <= least for sibling in siblings)

    # ---- the answer --------------------------------------------------------------------------------------

    def front(self, numbers: Iterable[int] | None = None) -> list[int]:
        """Return the Pareto front of these recipes, or of all that were simulated, the fastest first."""
        smallest, front = math.inf, []
        for number in sorted(self.evaluated if numbers is None else numbers, key=self.rank):
            needed = self.evaluated[number].needed_bytes
            if needed < smallest:
                smallest = needed
                front.append(number)
        return front

    def best_so_far(self, objective: str, batch_size: int) -> Choice | None:
        """Return the best simulated recipe by `objective` that fits, with its bytes and seconds; None if
        there is none.
        """
        best = reversed(self._best) if objective == "memory" else self._best
        number = next((number for _, needed, number in best if self.fits(needed)), None)
        return None if number is None else self.choice(number, batch_size)

    def fits(self, needed_bytes: int) -> bool:
        """Return True if a recipe with `needed_bytes` fits into the usable memory."""
        return self.memory_bytes is None or needed_bytes <= self.memory_bytes

    @property
    def most_seconds(self) -> float:
        """The largest seconds of recipes that may be on the Pareto front; infinite while nothing fits. With
        `nearly`, a near miss counts as fitting.
        """
        fastest = self.fastest_that_fits
        if fastest < math.inf or not self.nearly:
            return self.slowest * fastest
        near = (seconds for seconds, needed, _ in self._best if needed <= self.most_bytes)
        return next(near, math.inf) * (1 - self.nearly)

    @property
    def fastest_that_fits(self) -> float:
        """Seconds of the fastest simulated recipe that fits; infinite while none does."""
        return next((seconds for seconds, needed, _ in self._best if self.fits(needed)), math.inf)

    @property
    def nothing_fits(self) -> bool:
        """True if no simulated recipe fits."""
        return self.memory_bytes is not None and self.smallest > self.memory_bytes

    @property
    def smallest(self) -> float:
        """Bytes of the smallest simulated recipe; infinite while there is none."""
        return min((figures.needed_bytes for figures in self.evaluated.values()), default=math.inf)

    def rank(self, number: int) -> tuple[Any, ...]:
        """Return a sort key of simulated recipes: the fastest first, then the smallest, then the simplest."""
        figures, recipe = self.evaluated[number], self.space.candidates[number].recipe
        return figures.seconds, figures.needed_bytes, self.space.changes(recipe), str(recipe)

    def choice(self, number: int, batch_size: int) -> Choice:
        """Return a simulated recipe in the form of a plan's rows (`Choice`)."""
        candidate, figures = self.space.candidates[number], self.evaluated[number]
        return Choice(
            recipe=str(candidate.recipe),
            requested_bytes=figures.requested_bytes,
            allocated_bytes=figures.allocated_bytes,
            reserved_bytes=figures.reserved_bytes,
            context_bytes=figures.context_bytes,
            step_seconds=figures.step_seconds,
            samples_per_second=batch_size / figures.step_seconds if figures.step_seconds else 0.0,
            once_seconds=figures.once,
        )

    def counts(self) -> Counts:
        """Return the numbers of recipes that the search considered, computed lower bounds for, and
        simulated."""
        return Counts(
            recipes=len(self.space.candidates),
            tapes=len({candidate.trace for candidate in self.space.candidates}),
            footprints=len({bound.needed_bytes for bound in self.bounds.values()}),
            passes=self.kinds,
            replayed=len(self.evaluated),
        )


def exclusion(space: Space, group: list[int], error: SnugfitError) -> Exclusion:
    """Return the reason for excluding these recipes in the form of a plan. Raises `PoliciesDiffer` if that is
    the error, since a search for fewer GPUs avoids it.
    """
    if isinstance(error, PoliciesDiffer):
        raise error
    recipe = space.candidates[group[0]].recipe
    return Exclusion(what=str(recipe), why=str(error).splitlines()[0], recipes=len(group))
