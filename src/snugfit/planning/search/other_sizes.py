"""Lower bounds of a recipe's bytes and seconds, from the same recipe with more and smaller micro-batches.

Recomputation at most doubles a kernel's runs, and the host has slightly more work. Fewer micro-batches
therefore save at most three times the seconds that they save without it. The peak is the maximum over several
moments of a step, each linear in the number of samples. It is a convex function, and beyond two known sizes
it is never below the line through them. For compiled layers, one simulated size and the uncompiled recipe are
enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from snugfit.planning.cost.figures import Bound
from snugfit.planning.cost.shallow import linear_extrapolate
from snugfit.techniques import roster
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.planning.search.space import Space

PEAK_SHARE = 0.01
"""Share by which a step's bytes may be below their extrapolation from smaller micro-batches (chosen).
Workspaces do not grow linearly.
"""

MISSING = -1
"""Number that represents a recipe outside of the search."""

MOST_SAVED = 3
"""Largest assumed ratio of two savings in seconds by fewer micro-batches: with and without recomputation.

It was 2.2 for a small GPT-2 whose step is limited by the host.
"""


PLAIN_PASSES = (Slot.ENGINE, Slot.HEAD, Slot.CHECKPOINTING)
"""Slots (choices of a recipe) whose default techniques compile and recompute nothing, and compute all logits
together.
"""

TWO_SIZES = 2
"""Number of micro-batch sizes that a linear extrapolation needs."""


class OtherSizes:
    """Lower bounds of recipes' bytes and seconds, from the same recipes with smaller micro-batches. `bounds`
    are the known lower bounds by recipe number.
    """

    def __init__(self, space: Space, bounds: Mapping[int, Bound]) -> None:
        self.space, self._bounds = space, bounds
        self._smaller: dict[int, list[int]] = {}
        self._plain: dict[tuple[int, tuple[Slot, ...]], int] = {}

    def smaller(self, number: int) -> list[int]:
        """Return the numbers of the recipes that differ from this one only by smaller micro-batches, the
        largest first."""
        if number not in self._smaller:  # one loop computes the entries of all sizes
            sizes = sorted((number, *self.space.variants(number, Slot.BATCHING)), key=self.pieces)
            self._smaller |= {candidate: sizes[index:] for index, candidate in enumerate(sizes, start=1)}
        return self._smaller[number]

    def pieces(self, number: int) -> int:
        """Return the number of micro-batches per step of a candidate recipe."""
        return self.space.candidates[number].setup.micro_batches

    def least(self, number: int) -> Bound:
        """Return a recipe's lower bound of bytes and seconds, derived from the same recipe with smaller
        micro-batches.
        """
        known = [(other, self._bounds[other]) for other in self.smaller(number) if other in self._bounds]
        if not known:
            return Bound(0, 0.0)
        needed = int(self._needed_bytes(number, known) * (1 - PEAK_SHARE))
        return Bound(needed, self._seconds(number, *known[0]))

    def _seconds(self, number: int, other: int, bound: Bound) -> float:
        own, plain = self._bounds.get(self._without(number)), self._bounds.get(self._without(other))
        if own is None or plain is None:
            return 0.0
        return bound.seconds - MOST_SAVED * max(0.0, plain.seconds - own.seconds)

    def _needed_bytes(self, number: int, known: Sequence[tuple[int, Bound]]) -> float:
        """Return a lower bound of a recipe's bytes, extrapolated from two smaller micro-batch sizes; 0 if
        unknown. One size is enough for compiled layers.
        """
        (first, bound), *further = known
        pieces = self.pieces(number)
        if further:
            second, other = further[0]
            return self._on_line([(first, bound), (second, other)], 1 / pieces)
        if self.space.candidates[number].setup.lowering is None:
            return 0.0
        for slots in ((Slot.CHECKPOINTING,), (Slot.CHECKPOINTING, Slot.ENGINE), PLAIN_PASSES):
            if two := self._two_plainer(number, first, slots):
                break
        else:
            return 0.0
        if any(
            known_bound.needed_bytes <= known_bound.resting_bytes
            for known_bound in (*(known_bound for _, known_bound in two), bound)
        ):
            return 0.0  # the update determines the peak
        at_rest = self._on_line(two, 0.0)
        points, values = [0.0, 1 / self.pieces(first)], [at_rest, bound.needed_bytes]
        return float(linear_extrapolate(points, values, 1 / pieces))

    def _two_plainer(self, number: int, first: int, slots: tuple[Slot, ...]) -> list[tuple[int, Bound]]:
        """Return the bounds of the recipe with default techniques in `slots` (choices such as checkpointing),
        for two micro-batch sizes, beginning with that of `first`. Empty if they are unknown.
        """
        sizes = (first, number, *self.smaller(number))
        plain = {size: self._bounds.get(self._plainer(size, *slots)) for size in sizes}
        known = [(size, bound) for size, bound in plain.items() if bound is not None]
        return known[:TWO_SIZES] if plain[first] and len(known) >= TWO_SIZES else []

    def _on_line(self, sizes: Sequence[tuple[int, Bound]], share: float) -> float:
        """Return the bytes with micro-batches of the fraction `share` of the batch, on the line through two
        simulated sizes.
        """
        points = [1 / self.pieces(number) for number, _ in sizes]
        return float(linear_extrapolate(points, [bound.needed_bytes for _, bound in sizes], share))

    def _without(self, number: int) -> int:
        """Return the index of the recipe with this micro-batch size that is uncompiled, has whole logits and
        recomputes nothing.
        """
        return self._plainer(number, *PLAIN_PASSES)

    def _plainer(self, number: int, *slots: Slot) -> int:
        if (number, slots) not in self._plain:
            other = self.space.variant(number, *map(roster.plain, slots))
            self._plain[number, slots] = MISSING if other is None else other
        return self._plain[number, slots]
