"""Fixed slots of a plan in a test: all slots that the test is not about. Each further free slot makes the
search several times as long."""

from __future__ import annotations

from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot, Technique

REST = "ieee + torch_kernels + whole_logits + uncompiled + on_device + all_gradients"
"""Slots that tests of attention, precision, recomputing, batches, optimizers or GPUs leave fixed, in
words."""


def kept(recipe: str = "plain", *, but: str) -> dict[Slot, Technique]:
    """Return a plan's `keep`: every slot of this recipe except the named ones, which are searched."""
    whole = Recipe.parse(recipe)
    return {slot: whole[slot] for slot in Slot if slot not in {Slot(name) for name in but.split()}}
