"""Pairs of similar recipes (twins), which differ only in attention, kernels or precision. A search skips a
recipe if its twin is no worse.

Recomputing repeats the same layers, and a compiler changes all of them. Suppose that, uncompiled and without
recomputing, one of two such recipes is neither faster nor smaller. Then it is neither with compilation and
recomputing, and it is skipped. If a step cannot be recorded as CUDA graphs, its twin is the step without CUDA
graphs.

This rule is not exact. Each skipped recipe that is simulated after all is compared with its twin. If one is
better than its twin, recipes are skipped no longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from snugfit.planning.cost.figures import Bound
from snugfit.techniques import roster
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.planning.search.space import Space
    from snugfit.techniques.technique import Technique

DIFFER = (Slot.ATTENTION, Slot.KERNELS, Slot.PRECISION)
"""Slots (choices of a recipe) in which a recipe and its twin (a similar recipe) may differ."""

ROUNDING = 0.001
"""Relative tolerance in comparisons of the lower bounds of twins. It covers rounding of sums, and different
numbers of simulated layers.
"""

PEAK_SHARE = 0.01
"""Share by which a recipe may need fewer bytes than its twin, since its peak may be at another moment."""


class SimilarRecipes:
    """Finds for each recipe its twin (a similar recipe that is no worse), and records the recipes that were
    skipped. `base` returns the plainer recipe for the comparison, and `bound` a recipe's known lower bound.
    `may_be` returns True for a recipe that has lower bounds or is postponed. `is_refused` returns True for a
    step that cannot be recorded as CUDA graphs.
    """

    def __init__(
        self,
        space: Space,
        base: Callable[[int], int | None],
        bound: Callable[[int], Bound | None],
        may_be: Callable[[int], bool],
        is_refused: Callable[[int], bool],
    ) -> None:
        self.space, self._base, self._bound = space, base, bound
        self._may_be, self._is_refused = may_be, is_refused
        self.stand = True
        """True while no skipped recipe has turned out better than its twin, which was evaluated in its place.
        """
        self._no_better: dict[int, list[tuple[int, int]]] = {}
        """Skipped recipes with their twins, by group (recipes with the same forward and backward passes)."""

    def of(self, kind: int, needed: Sequence[int]) -> list[int]:
        """Return the twins that make the `needed` recipes of a group unnecessary; empty if there are none.
        The recipes of the group have the same forward and backward passes.
        """
        candidates = self.space.candidates
        # Candidates with the same trace have the same bytes, so one of them represents all.
        one_per_trace = {candidates[number].trace: number for number in needed}.values()
        for technique in self._other_techniques(needed[0]) if self.stand else ():
            pairs = [(number, self._with(number, technique)) for number in one_per_trace]
            known = [
                (number, twin) for number, twin in pairs if twin is not None and self._are_known(number, twin)
            ]
            if len(known) < len(pairs):
                continue
            needs = [(self._needs(number), self._needs(twin)) for number, twin in known]
            if any(_is_less(own, other) for own, other in needs):
                continue
            # The first of two equal groups remains. Otherwise each would exclude the other.
            if any(own != other for own, other in needs) or candidates[known[0][1]].passes < kind:
                self._no_better[kind] = known
                return [twin for _, twin in known]
        return []

    def drop_if_misleading(self) -> None:
        """Stop skipping recipes once a skipped one proves better than its twin."""
        if any(itertools.starmap(self._is_better, itertools.chain.from_iterable(self._no_better.values()))):
            self._no_better.clear()
            self.stand = False

    def _is_better(self, number: int, twin: int) -> bool:
        own, other = self._bound(number), self._bound(twin)
        if own is None or other is None:
            return False
        least = other._replace(needed_bytes=int(other.needed_bytes * (1 - PEAK_SHARE)))
        return is_below(own, least, ROUNDING)

    def _other_techniques(self, number: int) -> Iterator[Technique]:
        """Yield the techniques that turn this recipe into a similar one (a possible twin)."""
        candidates = self.space.candidates
        dtype = candidates[number].setup.weights_dtype
        for slot in DIFFER:
            for twin in self.space.variants(number, slot):
                # Weights of another dtype also change the memory of the update.
                if candidates[twin].setup.weights_dtype == dtype:
                    yield candidates[twin].recipe[slot]

    def _with(self, number: int, technique: Technique) -> int | None:
        twin = self.space.variant(number, technique)
        if twin is not None and self._is_refused(twin):
            twin = self.space.variant(twin, roster.plain(Slot.ENGINE))
        return twin

    def _are_known(self, number: int, twin: int) -> bool:
        bases = self._base(number), self._base(twin)
        return self._may_be(twin) and all(
            candidate is not None and self._bound(candidate) is not None for candidate in bases
        )

    def _needs(self, number: int) -> tuple[float, ...]:
        """Return the bytes and seconds by which this recipe is compared with its twin. They are the lower
        bounds of the recipe without recomputation and compilation.
        """
        base = self._base(number)
        bound = None if base is None else self._bound(base)
        assert base is not None
        assert bound is not None
        setup, plainer = self.space.candidates[number].setup, self.space.candidates[base].setup
        needs = _needs if setup.lowering == plainer.lowering else _needs_if_compiled
        return needs(bound)


def is_below(bound: Bound, other: Bound, share: float = 0.0) -> bool:
    """Return True if a bound is less than the other in seconds or bytes, by more than a tolerance."""
    return _is_less(_needs(bound), _needs(other), share)


def _needs(bound: Bound) -> tuple[float, ...]:
    """Return the bytes and seconds of a bound by which similar recipes are compared."""
    return bound.needed_bytes, bound.seconds, bound.resting_bytes, bound.layers_bytes


def _needs_if_compiled(bound: Bound) -> tuple[float, ...]:
    """Return the bytes and seconds by which recipes with compiled layers are compared. Only the uncompiled
    seconds include the host's launches.
    """
    return bound.compiled_bytes, bound.compiled_seconds, bound.resting_bytes, bound.seconds


def _is_less(own: Sequence[float], other: Sequence[float], share: float = 0.0) -> bool:
    return any(value < least * (1 - share) for value, least in zip(own, other, strict=True))
