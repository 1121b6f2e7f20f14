"""Lower bounds of the bytes and seconds of recipes with compiled layers, computed before any compilation."""

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
"""Largest share of a step's seconds that activation checkpointing may save, since it disables the key-value
cache.
"""


class LoweredKinds:
    """Lower bounds for a search's recipes with compiled layers, which are compiled only if the search needs
    them. This base class has no such recipe.

    `saves_nothing` maps a memory-saving recipe to the same one without savings.
    """

    waiting: Sequence[int] = ()
    """Numbers of the recipes with compiled layers that neither recompute nor compute logits in chunks."""

    def __init__(self, space: Any, state: Any, saves_nothing: Mapping[int, int | None]) -> None:
        self.space, self.state, self.saves_nothing = space, state, saves_nothing

    @staticmethod
    def is_left(operator: str) -> bool:
        """Return True if a compiled layer still runs this operator as a kernel of its own, and keeps its
        outputs for backward.
        """
        return True

    def __contains__(self, number: int) -> bool:
        return False

    def same_uncompiled(self, number: int) -> int | None:
        """Return the number of the otherwise equal recipe without compilation; None if this one has no
        compiled layers.
        """
        return None

    def bare(self, number: int) -> int:
        """Return the number of the otherwise equal recipe without compilation, recomputation or logits in
        chunks.
        """
        return number

    def bounded_by(self, number: int) -> Iterable[int]:
        """Return the numbers of the uncompiled recipes from whose lower bounds this recipe's follows; none
        for an uncompiled recipe.
        """
        return ()

    def least(self, number: int) -> Bound | None:
        """Return the lower bound of bytes and seconds of a recipe with compiled layers; None for an
        uncompiled recipe.
        """
        return None

    def again_seconds(self, number: int) -> float:
        """Return a lower bound of the seconds per step in which a recipe recomputes activations; 0 if
        unknown.
        """
        return 0.0


@cache
def lowered_kinds() -> type[LoweredKinds]:
    """Return the class of lower bounds for compiled recipes: that of the compiling feature, or the base
    class."""
    kinds = [kind for classes in hooks("lowered_kinds") for kind in classes()]
    return kinds[0] if kinds else LoweredKinds


def uncompiled_work(work: Work) -> Work:
    """Return the kernels of a step that would still run if its layers were compiled. Kernels outside of
    layers remain unchanged.
    """
    is_left = lowered_kinds().is_left
    kernels = (
        kernel
        for kernel in work.kernels
        if is_left(kernel.operator) or without_layer_numbers(kernel.module) == kernel.module
    )
    return Work(tuple(kernels), ())
