"""Where a search looks at budgets of compiled layers.

Each budget is a program of its own for each size of a micro-batch, which takes as long to lower as compiled
layers without one: looked at like any other kind of recomputing they took a plan of Llama-3.2-1B, 2 x 2048
tokens, from 49 seconds of CPU to 113. A budget saves memory and no time. So it is looked at where compiled
layers that keep all do not fit, and elsewhere said to be left out.
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
"""Of the seconds of compiled layers that keep all, how much less those with a budget may take. Of GPT-2,
RoBERTa, BERT, ViT, Qwen, Gemma and Llama none took less than these by the rates of an H200."""


class Budgets:
    """The candidates of a space whose compiled layers have a budget. `everywhere` looks at all of them, as
    where the best few recipes are listed."""

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
        """Whether this candidate has a budget and needs none: on each GPU the same without one fits. What the
        user has is always looked at."""
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
        """Those of these candidates that were not looked at, though the same without a budget was, in a
        sentence."""
        idle = [number for number in numbers if self.are_idle(number) and self._is_known_without(number)]
        if idle:
            name = self.space.candidates[idle[0]].recipe[Slot.CHECKPOINTING].name
            why = f"compiled layers fit without it, and are faster (--keep '{name}(0.5)' plans with it)"
            yield Exclusion(what=name, why=why, recipes=len(idle))

    def _fits(self, index: int, state: SearchState, number: int) -> bool:
        """By what is known of it. What was not judged although it may fit is no faster than something that
        does; what cannot be simulated cannot be with a budget either."""
        least = self.least_of(number)
        known = state.judged.get(number) or state.bounds.get(number) or (least and least[index])
        return not known or state.memory_bytes is None or known.needed_bytes <= state.memory_bytes
