"""Begin a search for a job without optimizer updates with the simplest recipe, and recipes with a single
change.

Such a job has no lower bounds from few layers, so a full simulation of each group of recipes takes seconds. A
technique that alone makes the step neither faster nor smaller is therefore not combined with others. If the
simplest recipe fits, a technique must be faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from snugfit.planning.plan import Exclusion
from snugfit.planning.search.simpler import AS_FAST
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.planning.search.recomputing import RecomputingKinds
    from snugfit.planning.search.state import SearchState

WHY = "alone it makes the step neither faster nor smaller, so it was not combined (--keep '{}' does so)"


def screen_single_changes(state: SearchState, kinds: RecomputingKinds, *, smallest: bool) -> None:
    """Simulate the simplest recipe and recipes with a single change of it. Exclude combinations with useless
    changes from the search.
    """
    state.rehearses_whole, space = True, state.space
    simplest = space.number(space.simplest)
    if simplest is None:
        return
    candidates, own = space.candidates, space.candidates[simplest].passes
    singles = [(slot, number) for slot in Slot for number in space.variants(simplest, slot)]
    passes = {own, *(candidates[number].passes for _, number in singles)}
    kinds.add([number for number, one in enumerate(candidates) if one.passes in passes])
    # Candidates with the passes of the simplest recipe share its rehearsal.
    dear = [(slot, number) for slot, number in singles if candidates[number].passes != own]
    useless = {
        candidates[number].recipe[slot]
        for slot, number in dear
        if not _is_useful(state, number, simplest, smallest=smallest)
    }
    left_out = [number for number in kinds.others if not useless.isdisjoint(candidates[number].recipe)]
    kinds.leave_out(left_out)
    for technique in sorted(useless, key=str):
        count = sum(technique in candidates[number].recipe for number in left_out)
        if count:
            why = WHY.format(technique)
            state.excluded.append(Exclusion(what=str(technique), why=why, recipes=count))


def _is_useful(state: SearchState, number: int, simplest: int, *, smallest: bool) -> bool:
    """Return True if a single change makes the simplest recipe faster, or smaller if that is needed."""
    bound, base = state.bounds.get(number), state.bounds.get(simplest)
    # Nothing is known of a change if one of the two cannot be simulated.
    if bound is None or base is None or bound.seconds < base.seconds * (1 - AS_FAST):
        return True
    needs_less = smallest or not state.fits(base.needed_bytes)
    return needs_less and bound.needed_bytes <= state.worth_listing(base.needed_bytes)
