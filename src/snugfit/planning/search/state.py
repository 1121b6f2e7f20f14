"""What a search has found so far: the least that each candidate takes, and what it takes.

The least bytes of a candidate are the live ones. What the allocator loses between blocks, some per cent,
shows only when the step is put together whole; so of the candidates that are as large as a faster one but for
that loss, each would have to be, to find out which of them is a hair smaller. Nobody asks for that: what
cannot be smaller than a faster one by a `GRAIN` is not looked for. The answer does not depend on it, for what
may fit where nothing faster does is always judged.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from typing import Any

from snugfit.planning.cost.figures import BelowLowerBound, Bound, Figures
from snugfit.planning.plan import Choice, Counts, Exclusion
from snugfit.planning.search.space import Space, not_plain

SLACK = 0.001
"""Of its least seconds, how much less a step may take than was screened: the line through two depths is the
convex figure's, and a queue of host and device is convex but for what happens at its ends."""

GRAIN = 0.03
"""Of a recipe's bytes, by how much a slower one must be smaller to be worth telling: about what the allocator
loses between the blocks of a step."""


@dataclass
class Searched:
    """A space, screened and judged."""

    space: Space
    bounds: dict[int, Bound] = field(default_factory=dict)
    """The least that a candidate takes, by its number."""
    judged: dict[int, Figures] = field(default_factory=dict)
    """What it takes."""
    excluded: list[Exclusion] = field(default_factory=list)
    """What could not be rehearsed."""
    kinds: int = 0
    """Of passes."""
    memory_bytes: int | None = None
    """What the answer has to fit; None where nothing is asked to."""
    _best: list[tuple[float, int]] = field(default_factory=list)
    """Seconds and bytes of those judged that no other beats, the fastest first."""

    def judge(self, number: int, figures: Figures) -> None:
        """This is what it takes. Raises `BelowLowerBound` where that is less than the least."""
        least = self.bounds[number]
        if figures.needed_bytes < least.needed_bytes or figures.seconds < least.seconds * (1 - SLACK):
            raise BelowLowerBound
        self.judged[number] = figures
        self._learn(figures.seconds, figures.needed_bytes)

    def front(self) -> list[int]:
        """Of those judged, which no other is both as fast and as small as; the fastest first."""
        best, found = None, []
        for number in sorted(self.judged, key=self.rank):
            figures = self.judged[number]
            if best is None or figures.needed_bytes < best:
                best = figures.needed_bytes
                found.append(number)
        return found

    @property
    def smallest(self) -> float:
        """Bytes of the smallest that was judged; infinite while there is none."""
        return min((figures.needed_bytes for figures in self.judged.values()), default=math.inf)

    def rank(self, number: int) -> tuple[Any, ...]:
        """Sorts those judged: the fastest first, then the smallest, then the plainest."""
        figures, recipe = self.judged[number], self.space.candidates[number].recipe
        return figures.seconds, figures.needed_bytes, not_plain(recipe), str(recipe)

    def beaten(self, number: int) -> bool:
        """Whether some recipe that was judged is as fast as this one can be, and this one cannot be smaller
        by a grain, nor fit where that one does not."""
        least = self.bounds[number]
        place = bisect.bisect_right(self._best, (least.seconds * (1 - SLACK), math.inf))
        if not place:
            return False
        smallest = self._best[place - 1][1]
        if self.memory_bytes is not None and least.needed_bytes <= self.memory_bytes < smallest:
            return False
        return smallest * (1 - GRAIN) <= least.needed_bytes

    def too_large(self, number: int) -> bool:
        """Whether this one cannot be the smallest."""
        return number in self.judged or self.bounds[number].needed_bytes > self.smallest

    def _learn(self, seconds: float, needed_bytes: int) -> None:
        place = bisect.bisect_right(self._best, (seconds, needed_bytes))
        if place and self._best[place - 1][1] <= needed_bytes:
            return
        end = place
        while end < len(self._best) and self._best[end][1] >= needed_bytes:
            end += 1
        self._best[place:end] = [(seconds, needed_bytes)]

    def choice(self, number: int, batch_size: int) -> Choice:
        """This one, as a plan states it."""
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
        """How much was looked at."""
        return Counts(
            recipes=len(self.space.candidates),
            tapes=len({candidate.trace for candidate in self.space.candidates}),
            footprints=len({bound.needed_bytes for bound in self.bounds.values()}),
            passes=self.kinds,
            replayed=len(self.judged),
        )
