"""What a search knows: the lower bounds of each candidate, and what those cost that were judged.

A candidate's lower bound in bytes is its live bytes. What the allocator loses between blocks, some per cent,
shows only when the step is put together in full; so of the candidates that are as large as a faster one but
for that loss, each would have to be, to find out which of them is a little smaller. Nobody asks for that:
what cannot be smaller than a faster one by `MEMORY_RESOLUTION` is not judged. The answer does not depend on
it, for what may fit where nothing faster does is always judged.

Recipes that share their passes and differ in the update lose alike between blocks, and their seconds are as
far above the bounds. So they are compared by those (`has_better_sibling`): where the update is a small share,
one of the optimizers is judged.

Where a memory is given, the front ends a little beyond it: what is larger is no answer, and costs as much to
judge. Where nothing fits, it goes on to a little beyond the smallest. Likewise it ends at some times the
seconds of the fastest that fits, once one is known. Nothing slower ever shows that something faster is
needless, so what lies within that is what a search without this end finds there.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from snugfit.errors import SnugfitError
from snugfit.planning.cost.figures import BelowLowerBound, Bound, Figures
from snugfit.planning.plan import Choice, Counts, Exclusion
from snugfit.planning.search.progress import Progress, Tell
from snugfit.planning.search.space import Space
from snugfit.prediction.worker_pool import Question, WorkerPool
from snugfit.rehearsal.device.policy import PoliciesDiffer

TIME_BOUND_MARGIN = 0.001
"""Of its lower bound in seconds, how much less a step may take: the line through two depths bounds a convex
figure, and a queue of host and device is convex but for what happens at its ends."""

MEMORY_RESOLUTION = 0.03
"""Of a recipe's bytes, by how much a slower one must be smaller to be worth listing: about what the allocator
loses between the blocks of a step."""

NEGLIGIBLE_BYTES = 160 << 20
"""Bytes that a slower recipe must save at least to be worth listing (chosen). Segments of the allocator and
workspaces of libraries cost a tiny model some 100 MiB that no lower bound contains."""

BEYOND_MEMORY = 0.1
"""Of the memory, how far beyond it the front goes: near misses, for which a little more would be enough."""

SAMPLED = 50
"""Groups by which it is estimated how many of those that wait will be skipped."""


@dataclass
class SearchState:
    """A space of candidates, each known by its number: bounded, and some of them judged."""

    space: Space
    bounds: dict[int, Bound] = field(default_factory=dict)
    """The least that a candidate can take; none of those that cannot be rehearsed."""
    judged: dict[int, Figures] = field(default_factory=dict)
    """What a candidate takes."""
    excluded: list[Exclusion] = field(default_factory=list)
    """What could not be rehearsed."""
    kinds: int = 0
    """How many kinds of passes were rehearsed for the bounds."""
    memory_bytes: int | None = None
    """What the answer has to fit; None where nothing is asked to."""
    most_bytes: float = math.inf
    """Above this nothing is judged for the front; by default beyond the memory by `BEYOND_MEMORY`."""
    negligible_bytes: int = 0
    """Bytes that a slower one must save at least, beside `MEMORY_RESOLUTION`, to be worth listing."""
    slowest: float = math.inf
    """Times the seconds of the fastest that fits: what takes longer is not judged for the front."""
    screen_these: Callable[[Iterable[int], Callable[[Bound], bool]], None] = lambda numbers, is_needed: None
    """Gives these candidates lower bounds, of whatever kinds were left out so far, if they are needed by the
    least that is known of them."""
    _best: list[tuple[float, int, int]] = field(default_factory=list)
    """Seconds, bytes and number of the judged ones that no other dominates, the fastest first."""
    _siblings: dict[tuple[int, bool, bool], list[int]] = field(
        default_factory=lambda: defaultdict(list), init=False
    )
    """By the kind and size of passes and the allocator's kind of segments, which candidates were judged."""
    _worker_of: dict[int, int] = field(default_factory=dict, init=False)
    """By the kind and size of compiled layers or passes, which worker rehearses them."""

    def __post_init__(self) -> None:
        if self.memory_bytes is not None:
            self.most_bytes = self.memory_bytes * (1 + BEYOND_MEMORY)

    # ---- judging -----------------------------------------------------------------------------------------

    def judge(
        self,
        groups: Iterable[list[int]],
        pool: WorkerPool,
        *,
        skip: Callable[[int], bool] = lambda number: False,
        step: Callable[[bool], None] = lambda skips: None,
    ) -> None:
        """Judges these groups of one trace each, in this order, but for candidates of which `skip` holds when
        their turn comes; `step` hears of each group, and whether all of it was skipped. All that share their
        passes go to one worker. Raises `BelowLowerBound`."""
        waiting = deque(groups)
        asked: dict[int, list[int]] = {}

        def ask(worker: int) -> Question | None:
            set_aside: list[list[int]] = []
            question = None
            while waiting and question is None:
                group = [number for number in waiting.popleft() if not skip(number)]
                if group and not self.is_for(worker, group[0]):
                    set_aside.append(group)
                    continue
                step(not group)
                if group:
                    asked[group[0]] = group
                    setups = [self.space.candidates[number].setup for number in group]
                    question = Question(group[0], "judge", (setups,))
            waiting.extendleft(reversed(set_aside))
            return question

        for answer in pool.answers(ask):
            self.learn_group(asked.pop(answer.number), answer.value)

    def may_be_for(self, worker: int, number: int) -> bool:
        """Return whether no other worker rehearses what the candidate shares its layers or passes with."""
        return self._worker_of.get(self.space.candidates[number].program, worker) == worker

    def is_for(self, worker: int, number: int) -> bool:
        """Return whether this worker rehearses the candidate: the first that may stays the only one, for it
        has what others would have to make again."""
        return self._worker_of.setdefault(self.space.candidates[number].program, worker) == worker

    def is_begun(self, number: int) -> bool:
        """Return whether a worker rehearsed something that shares its compiled layers with the candidate."""
        return self.space.candidates[number].program in self._worker_of

    def learn_group(self, group: list[int], answer: Any) -> None:
        """Note what these candidates of one trace take, or the error for which they cannot be judged. Raises
        `BelowLowerBound`."""
        if isinstance(answer, SnugfitError):
            self.exclude(group, answer)
            return
        for number, (figures,) in zip(group, answer, strict=True):
            self.learn(number, figures)

    def learn(self, number: int, figures: Figures) -> None:
        """This is what a candidate takes. Raises `BelowLowerBound` where that is less than it can take."""
        least, seconds, needed = self.bounds[number], figures.seconds, figures.needed_bytes
        if needed < least.needed_bytes or seconds < least.seconds * (1 - TIME_BOUND_MARGIN):
            raise BelowLowerBound
        self.judged[number] = figures
        self._siblings.setdefault(self.passes_of(number), []).append(number)
        start = bisect.bisect_right(self._best, (seconds, needed, number))
        if start and self._best[start - 1][1] <= needed:
            return
        end = start
        while end < len(self._best) and self._best[end][1] >= needed:
            end += 1
        self._best[start:end] = [(seconds, needed, number)]

    def exclude(self, group: list[int], error: SnugfitError) -> None:
        """These cannot be rehearsed."""
        self.excluded.append(exclusion(self.space, group, error))
        for number in group:
            self.bounds.pop(number, None)

    def judge_smallest(self, pool: WorkerPool, tell: Tell) -> None:
        """Judge what may be the smallest, the smallest bound first. Raises `BelowLowerBound`."""
        groups = self.by_trace(number for number in self.bounds if number not in self.judged)
        groups.sort(key=lambda group: min(self.bounds[number][:2] for number in group))
        tell("checking")
        progress = Progress("checking", len(groups), tell)

        def step(skips: bool) -> None:
            left = [group[0] for group in groups[progress.done :: max(1, len(groups) // SAMPLED)]]
            due = sum(number in self.bounds and not self.cannot_be_smallest(number) for number in left)
            progress.step(skips, due / max(1, len(left)))

        self.judge(groups, pool, skip=self.cannot_be_smallest, step=step)

    # ---- what is worth judging ---------------------------------------------------------------------------

    def by_trace(self, numbers: Iterable[int]) -> list[list[int]]:
        """These candidates, those of one trace together where the first of them stands."""
        groups: dict[int, list[int]] = defaultdict(list)
        for number in numbers:
            groups[self.space.candidates[number].trace].append(number)
        return list(groups.values())

    def is_dominated(self, number: int, least: Bound | None = None) -> bool:
        """Whether this one is too large or too slow for the front, or some judged recipe is as fast as it can
        be, and it can be neither smaller by `MEMORY_RESOLUTION` nor fit where that one does not."""
        if least is None and self.has_better_sibling(number, self._stands_for(number)):
            return True
        least = least or self.bounds[number]
        least_seconds = least.seconds * (1 - TIME_BOUND_MARGIN)
        if least.needed_bytes > self.most_bytes or least_seconds > self.most_seconds:
            return True
        faster = bisect.bisect_right(self._best, (least_seconds, math.inf, 0))
        if not faster:
            return False
        smallest = self._best[faster - 1][1]
        if self.memory_bytes is not None and least.needed_bytes <= self.memory_bytes < smallest:
            return False
        return self._worth_listing(smallest) <= least.needed_bytes

    def _worth_listing(self, needed_bytes: int) -> float:
        """Return the most bytes of a slower recipe that is worth listing beside one with these."""
        return min(needed_bytes * (1 - MEMORY_RESOLUTION), needed_bytes - self.negligible_bytes)

    def has_better_sibling(self, number: int, stands: Callable[[int], bool]) -> bool:
        """Whether a sibling was judged that is as fast by its lower bound, and `stands` for this one."""
        bounds, least = self.bounds, self.bounds[number].seconds
        return any(
            bounds[other].seconds <= least
            and self.judged[other].seconds * (1 - TIME_BOUND_MARGIN) <= least
            and stands(other)
            for other in self.siblings(number)
        )

    def siblings(self, number: int) -> list[int]:
        """Those judged that have the same passes and the same allocator."""
        same_passes = self._siblings.get(self.passes_of(number), ())
        return [other for other in same_passes if other != number and other in self.bounds]

    def _stands_for(self, number: int) -> Callable[[int], bool]:
        """Whether this one can be neither smaller than another by a resolution nor fit in its place."""
        needed = self.bounds[number].needed_bytes

        def stands(other: int) -> bool:
            if self._worth_listing(self.bounds[other].needed_bytes) > needed:
                return False
            return self.fits(self.judged[other].needed_bytes) or not self.fits(needed)

        return stands

    def passes_of(self, number: int) -> tuple[int, bool, bool]:
        """Equal for candidates that have the same passes, recorded or not, and the same allocator."""
        candidate = self.space.candidates[number]
        setup = candidate.setup
        return candidate.sized, setup.expandable_segments, setup.capture is not None

    def cannot_be_smallest(self, number: int) -> bool:
        """Whether a judged one is smaller than this can be, or this was judged."""
        return number in self.judged or self.bounds[number].needed_bytes > self.smallest

    # ---- the answer --------------------------------------------------------------------------------------

    def front(self, numbers: Iterable[int] | None = None) -> list[int]:
        """Of these candidates, or of all that were judged, those than which no other is both as fast and as
        small, the fastest first."""
        smallest, front = math.inf, []
        for number in sorted(self.judged if numbers is None else numbers, key=self.rank):
            needed = self.judged[number].needed_bytes
            if needed < smallest:
                smallest = needed
                front.append(number)
        return front

    def best_so_far(self, objective: str, batch_size: int) -> Choice | None:
        """Of those judged the best that fits; None while none does."""
        best = reversed(self._best) if objective == "memory" else self._best
        number = next((number for _, needed, number in best if self.fits(needed)), None)
        return None if number is None else self.choice(number, batch_size)

    def fits(self, needed_bytes: int) -> bool:
        """Whether so many bytes fit."""
        return self.memory_bytes is None or needed_bytes <= self.memory_bytes

    @property
    def most_seconds(self) -> float:
        """Above this nothing is judged for the front; infinite while nothing fits."""
        return self.slowest * self.fastest_that_fits

    @property
    def fastest_that_fits(self) -> float:
        """Seconds of the fastest that was judged and fits; infinite while nothing does."""
        return next((seconds for seconds, needed, _ in self._best if self.fits(needed)), math.inf)

    @property
    def nothing_fits(self) -> bool:
        """Whether none of those judged fits."""
        return self.memory_bytes is not None and self.smallest > self.memory_bytes

    @property
    def smallest(self) -> float:
        """Bytes of the smallest that was judged; infinite while there is none."""
        return min((figures.needed_bytes for figures in self.judged.values()), default=math.inf)

    def rank(self, number: int) -> tuple[Any, ...]:
        """Sorts the judged ones: the fastest first, then the smallest, then the simplest."""
        figures, recipe = self.judged[number], self.space.candidates[number].recipe
        return figures.seconds, figures.needed_bytes, self.space.changes(recipe), str(recipe)

    def choice(self, number: int, batch_size: int) -> Choice:
        """A judged candidate, as a plan states it."""
        candidate, figures = self.space.candidates[number], self.judged[number]
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
        """How much was searched."""
        return Counts(
            recipes=len(self.space.candidates),
            tapes=len({candidate.trace for candidate in self.space.candidates}),
            footprints=len({bound.needed_bytes for bound in self.bounds.values()}),
            passes=self.kinds,
            replayed=len(self.judged),
        )


def exclusion(space: Space, group: list[int], error: SnugfitError) -> Exclusion:
    """That these candidates cannot be rehearsed. Raises the error itself where they can, on fewer GPUs at a
    time."""
    if isinstance(error, PoliciesDiffer):
        raise error
    recipe = space.candidates[group[0]].recipe
    return Exclusion(what=str(recipe), why=str(error).splitlines()[0], recipes=len(group))
