"""What a plan in a test leaves as it is: all that the test is not about, since each further slot makes the
search several times as long."""

from __future__ import annotations

from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot, Technique

REST = "ieee + torch_kernels + whole_logits + uncompiled + on_device + all_gradients"
"""Slots that a test of attention, precision, recomputing, batches, optimizers or GPUs is not about, in
words."""


def kept(recipe: str = "plain", *, but: str) -> dict[Slot, Technique]:
    """A plan's `keep`: every slot as this recipe has it, but those of these names, which are searched."""
    whole = Recipe.parse(recipe)
    return {slot: whole[slot] for slot in Slot if slot not in {Slot(name) for name in but.split()}}
