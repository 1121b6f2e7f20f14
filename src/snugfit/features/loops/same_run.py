"""Comparison of the current run with the run of a checkpoint, for both `fit` and `accelerate`.

Two runs are the same if their facts (`training/checkpoint/facts.py`) and recipes agree. Recipes may differ in
slots that do not affect the saved state, with a warning. These are attention, checkpointing, micro-batches,
the allocator, workers, and the rounding of matrix products. Running out of memory can change some of them. An
optimizer is identified by its class and hyperparameters, fused or not. Another precision, or other adapters,
make another run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError
from snugfit.frontends.next_recipe import CHANGING
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot
from snugfit.training.checkpoint.facts import compare_facts
from snugfit.training.checkpoint.manager import CheckpointManager, differences

if TYPE_CHECKING:
    from snugfit.training.checkpoint.manifest import Checkpoint

FREE_SLOTS = CHANGING | {Slot.LOADING, Slot.MATMUL, Slot.OPTIMIZER}
"""Slots (choices of a recipe) whose technique may differ when a run is resumed. Optimizers are compared by
their facts.
"""


def refuse_another_run(
    manager: CheckpointManager,
    checkpoint: Checkpoint,
    now: Mapping[str, Any],
    *,
    names: Sequence[str],
    recipe: str,
    cure: str,
    warned: Sequence[str] = (),
) -> None:
    """Compare a checkpoint's description of its run with that of the current run, `now`.

    The entries `names`, the recipe in the entry `recipe`, and the facts are compared. Raises `UsageError` for
    another run's checkpoint. A difference that changes the bits of the results, such as one in `warned`,
    gives a warning.
    """
    before = checkpoint.about
    known = [name for name in names if name in before]
    wrong = differences(before, now, known) if known else []
    changed = differences(before, now, ("versions", *(name for name in warned if name in before)))
    other_states, same_states = recipe_differences(str(before.get(recipe)), str(now[recipe]))
    wrong += [*other_states, *compare_facts(before, now)]
    manager.refuse_another_run(checkpoint, wrong, [*same_states, *changed], cure=cure)


def recipe_differences(before: str, now: str) -> tuple[list[str], list[str]]:
    """Return the differences of two recipes in two lists. The first affects the saved state of a run. The
    second, of `FREE_SLOTS`, does not.
    """
    try:
        old, new = Recipe.parse(before), Recipe.parse(now)
    except SnugfitError:  # this version of snugfit does not have the technique
        return differences({"recipe": before}, {"recipe": now}), []
    other = [slot for slot in Slot if old[slot] != new[slot]]
    if not other:
        return [], []
    wrong = [
        f"the recipe's {slot.value} was '{old[slot]}' and is now '{new[slot]}'"
        for slot in other
        if slot not in FREE_SLOTS
    ]
    return wrong, [] if wrong else differences({"recipe": before}, {"recipe": now})
