"""Conditions under which a search includes budgets of compiled layers.

Each budget is a separate program for each size of a micro-batch. Lowering it takes as long as for compiled
layers without one. As an ordinary kind of recomputing, budgets increased a plan from 49 to 113 seconds of
CPU (Llama-3.2-1B, 2 x 2048 tokens). A budget saves memory and no time. It is therefore included only if
compiled layers that keep all do not fit, and otherwise reported as left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from snugfit.planning.plan import Exclusion
from snugfit.techniques import roster
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.planning.cost.figures import Bound
    from snugfit.planning.search.space import Space
    from snugfit.planning.search.state import SearchState

BUDGET_SHARE = 0.02
"""Greatest share by which layers with a budget may take fewer seconds than compiled layers that keep all.

None of GPT-2, RoBERTa, BERT, ViT, Qwen, Gemma and Llama took less than these by the rates of an H200.
"""


class Budgets:
    """The candidates of a space whose compiled layers have a budget.

    `everywhere` includes all of them, for lists of the best few recipes.
    """

    def __init__(
        self,
        space: Space,
        states: Sequence[SearchState],
        least_of: Callable[[int], Sequence[Bound] | None],
        *,
        everywhere: bool = False,
    ) -> None:
        self.space, self.states, self.least_of, self.everywhere = space, states, least_of, everywhere

    def are_idle(self, number: int) -> bool:
        """Return whether this candidate has a budget without need: the same without one fits on each GPU.

        The user's own budget is always included.
        """
        candidate, start = self.space.candidates[number], self.space.fixed.start
        own = start is not None and start[Slot.CHECKPOINTING] == candidate.recipe[Slot.CHECKPOINTING]
        if self.everywhere or own or not candidate.setup.has_budget:
            return False
        if (without := self._without(number)) is None:
            return False
        return all(self._fits(index, state, without) for index, state in enumerate(self.states))

    def _without(self, number: int) -> int | None:
        return self.space.variant(number, roster.plain(Slot.CHECKPOINTING))

    def _is_known_without(self, number: int) -> bool:
        return self._without(number) in self.states[0].bounds

    def left_out(self, numbers: Iterable[int]) -> Iterator[Exclusion]:
        """Yield one exclusion for the idle candidates whose recipe without a budget was screened."""
        idle = [number for number in numbers if self.are_idle(number) and self._is_known_without(number)]
        if idle:
            name = self.space.candidates[idle[0]].recipe[Slot.CHECKPOINTING].name
            why = f"compiled layers fit without it, and are faster (--keep '{name}(0.5)' plans with it)"
            yield Exclusion(what=name, why=why, recipes=len(idle))

    def _fits(self, index: int, state: SearchState, number: int) -> bool:
        """Return whether a candidate may fit by its known bytes.

        A candidate that may fit and was not evaluated is no faster than another that fits. A candidate
        that cannot be simulated cannot be simulated with a budget either.
        """
        least = self.least_of(number)
        known = state.judged.get(number) or state.bounds.get(number) or (least and least[index])
        return not known or state.memory_bytes is None or known.needed_bytes <= state.memory_bytes
