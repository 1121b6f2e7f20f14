"""Lower bounds of candidates whose layers a compiler lowers, before it does so.

A feature with a `Lowering` has a subclass (`Feature.lowered_kinds`). Without one, no candidate is lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from snugfit.rehearsal.trace.relative import without_layer_numbers
from snugfit.rehearsal.trace.trace import Work
from snugfit.techniques.registry import hooks

if TYPE_CHECKING:
    from snugfit.planning.cost.figures import Bound
    from snugfit.planning.plan import Exclusion

CACHE_SHARE = 0.1
"""Greatest share by which recomputing may reduce the seconds of a step."""


class LoweredKinds:
    """Lowered candidates of a space. They wait until a search needs them. Here there are none.

    `saves_nothing` maps a recomputing candidate to the same one without recomputing. `least_of` returns the
    bounds of a waiting candidate by GPU. `everywhere` includes candidates that are idle.
    """

    waiting: Sequence[int] = ()
    """Candidates without recomputing and with whole logits."""

    def __init__(
        self,
        space: Any,
        states: Sequence[Any],
        saves_nothing: Mapping[int, int | None],
        least_of: Callable[[int], Sequence[Bound] | None],
        *,
        everywhere: bool = False,
    ) -> None:
        self.space, self.states, self.saves_nothing = space, states, saves_nothing
        self.least_of, self.everywhere = least_of, everywhere

    @staticmethod
    def is_left(operator: str) -> bool:
        """Return whether a lowered layer runs this operator too, and keeps outputs that its backward pass
        reads."""
        return True

    def __contains__(self, number: int) -> bool:
        return False

    def alike(self, number: int) -> int | None:
        """Return the same candidate, not lowered."""
        return None

    def bare(self, number: int) -> int:
        """Return the same candidate, not lowered, without recomputing and with whole logits."""
        return number

    def bounded_by(self, number: int) -> Iterable[int]:
        """Return the candidates that bound this one; none for a candidate that is not lowered."""
        return ()

    def least(self, number: int) -> Bound | None:
        """Return the lower bound of this candidate; None for one that is not lowered."""
        return None

    def again_seconds(self, number: int) -> float:
        """Return the least seconds of its recomputation; 0 if unknown."""
        return 0.0

    def saved_share(self, number: int) -> float:
        """Return the greatest share of its seconds that recomputing may save."""
        return CACHE_SHARE

    def is_idle(self, number: int) -> bool:
        """Return whether this candidate saves memory without need: it fits on each GPU without."""
        return False

    def left_out(self, numbers: Iterable[int]) -> Iterable[Exclusion]:
        """Return exclusions for the idle ones among these candidates."""
        return ()


@cache
def lowered_kinds() -> type[LoweredKinds]:
    """Return the class of a feature that lowers layers, or the one without lowered candidates."""
    kinds = [kind for classes in hooks("lowered_kinds") for kind in classes()]
    return kinds[0] if kinds else LoweredKinds


def left_by_lowering(work: Work) -> Work:
    """Return the kernels of a step that lowered layers launch too. Nothing outside layers changes."""
    is_left = lowered_kinds().is_left
    kernels = (
        one
        for one in work.kernels
        if is_left(one.operator) or without_layer_numbers(one.module) == one.module
    )
    return Work(tuple(kernels), ())
