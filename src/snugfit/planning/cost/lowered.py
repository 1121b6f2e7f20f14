"""Lower bounds of recipes with compiled layers, computed before the layers are compiled.

A feature with a `Lowering` has a subclass (`Feature.lowered_kinds`). Without one, no candidate is lowered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from snugfit.rehearsal.trace.relative import without_layer_numbers
from snugfit.rehearsal.trace.trace import Work
from snugfit.techniques.registry import hooks

if TYPE_CHECKING:
    from snugfit.planning.cost.figures import Bound

CACHE_SHARE = 0.1
"""Largest share of a step's seconds that recomputing may save, by disabling a cache of keys and values."""


class LoweredKinds:
    """Lower bounds for the compiled recipes of a search, which are compiled only if the search needs them.
    This base class has none.

    `saves_nothing` maps a recomputing candidate to the same one without recomputing.
    """

    waiting: Sequence[int] = ()
    """Candidates with compiled layers that save no memory: without recomputing and with whole logits."""

    def __init__(self, space: Any, state: Any, saves_nothing: Mapping[int, int | None]) -> None:
        self.space, self.state, self.saves_nothing = space, state, saves_nothing

    @staticmethod
    def is_left(operator: str) -> bool:
        """Return True if a compiled layer runs this operator too, and keeps outputs that its backward pass
        reads.
        """
        return True

    def __contains__(self, number: int) -> bool:
        return False

    def alike(self, number: int) -> int | None:
        """Return the uncompiled recipe that is otherwise equal; None for a recipe without compilation."""
        return None

    def bare(self, number: int) -> int:
        """Return the recipe without compilation and recomputation, and with whole logits, that is otherwise
        equal.
        """
        return number

    def bounded_by(self, number: int) -> Iterable[int]:
        """Return the uncompiled recipes whose bytes and seconds bound those of this one; none for a recipe
        without compilation.
        """
        return ()

    def least(self, number: int) -> Bound | None:
        """Return the lower bound of a compiled recipe's bytes and seconds; None for a recipe without
        compilation.
        """
        return None

    def again_seconds(self, number: int) -> float:
        """Return a lower bound of the seconds that a recipe spends on recomputing activations; 0 if
        unknown.
        """
        return 0.0


@cache
def lowered_kinds() -> type[LoweredKinds]:
    """Return the feature's class of bounds for compiled recipes, or the base class."""
    kinds = [kind for classes in hooks("lowered_kinds") for kind in classes()]
    return kinds[0] if kinds else LoweredKinds


def left_by_lowering(work: Work) -> Work:
    """Return the kernels of a step that remain if its layers are compiled. Kernels outside of layers remain
    unchanged.
    """
    is_left = lowered_kinds().is_left
    kernels = (
        one
        for one in work.kernels
        if is_left(one.operator) or without_layer_numbers(one.module) == one.module
    )
    return Work(tuple(kernels), ())
