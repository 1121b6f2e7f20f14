"""What a search has found so far: the least that each candidate takes, and what it takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from snugfit.planning.plan import Choice, Counts
from snugfit.planning.space import Refusal, Space, not_plain

if TYPE_CHECKING:
    from snugfit.planning.figures import Bound, Figures
    from snugfit.techniques.recipe import Recipe

SLACK = 0.001
"""Of its least seconds, how much less a step may take than was screened: the line through two depths is the
convex figure's, and a queue of host and device is convex but for what happens at its ends."""


class Irregular(Exception):
    """A Setup took less than the least that it was given."""


@dataclass
class Searched:
    """A space, screened and judged."""

    space: Space
    bounds: dict[int, Bound] = field(default_factory=dict)
    """The least that a candidate takes, by its number."""
    judged: dict[int, Figures] = field(default_factory=dict)
    """What it takes."""
    refused: list[Refusal] = field(default_factory=list)
    """What could not be rehearsed."""
    kinds: int = 0
    """Of passes."""
    _numbers: dict[Recipe, int] = field(default_factory=dict)

    def number(self, recipe: Recipe) -> int | None:
        """The candidate that stands for this recipe; None when it is not in the space."""
        if not self._numbers:
            for number, candidate in enumerate(self.space.candidates):
                self._numbers |= dict.fromkeys((candidate.recipe, *candidate.alike), number)
        return self._numbers.get(recipe)

    def judge(self, number: int, figures: Figures) -> None:
        """This is what it takes. Raises `Irregular` where that is less than the least."""
        least = self.bounds[number]
        if figures.needed_bytes < least.needed_bytes or figures.seconds < least.seconds * (1 - SLACK):
            raise Irregular
        self.judged[number] = figures

    def front(self) -> list[int]:
        """Of those judged, which no other is both as fast and as small as; the fastest first."""
        best, found = None, []
        for number in sorted(self.judged, key=self.rank):
            figures = self.judged[number]
            if best is None or figures.needed_bytes < best:
                best = figures.needed_bytes
                found.append(number)
        return found

    def rank(self, number: int) -> tuple[Any, ...]:
        """Sorts those judged: the fastest first, then the smallest, then the plainest."""
        figures, recipe = self.judged[number], self.space.candidates[number].recipe
        return figures.seconds, figures.needed_bytes, not_plain(recipe), str(recipe)

    def beaten(self, number: int) -> bool:
        """Whether this one cannot be better than one that was judged."""
        least = self.bounds[number]
        return any(
            known.seconds <= least.seconds * (1 - SLACK) and known.needed_bytes <= least.needed_bytes
            for known in self.judged.values()
        )

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
            alike=tuple(map(str, candidate.alike)),
        )

    def counts(self) -> Counts:
        """How much was looked at."""
        return Counts(
            recipes=self.space.recipes,
            tapes=len(self.space.candidates),
            footprints=len({bound.needed_bytes for bound in self.bounds.values()}),
            passes=self.kinds,
            replayed=len(self.judged),
        )
