"""What a run goes on with when memory ran out: the same training in less memory.

The plan for this GPU is asked once more, with less memory than the broken recipe is foreseen to need, at the
recipe's own fidelity. What the states of a run depend on stays: the same optimizer, the same precision, the
same adapters; so whatever the plan gives can be gone on with. Where nothing can be foreseen (on the CPU, for
a GPU that is not in the table, when the search finds nothing) the batch is cut into more micro-batches.

No answer changes the global batch, and none is less exact than what was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from snugfit.errors import SnugfitError
from snugfit.job.job import Job
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity, Slot

if TYPE_CHECKING:
    import torch

LESS = 0.9
"""Of the memory that the broken recipe is foreseen to need, what the next may: a tenth is beyond any error of
a prediction (docs/accuracy.md), and less than most techniques save."""

CHANGING = frozenset({Slot.ATTENTION, Slot.CHECKPOINTING, Slot.BATCHING, Slot.ALLOCATOR})
"""Slots that may be filled otherwise when a run is built once more: its states know nothing of them."""

RANKED = 32
"""Recipes of a plan that are looked through for one that a live model can follow: each costs a replay, and
only those that join micro-batches are passed by."""


def next_recipe(
    device: torch.device, *, live: bool = False, changing: Collection[Slot] = CHANGING
) -> Callable[[Job, Recipe, str], Recipe | None]:
    """For runs on this device: the recipe that follows one that ran out of memory, or None. One that differs
    in slots that are `changing` alone; for a model that is `live`, one that it can go on under as it is."""

    def following(job: Job, recipe: Recipe, cause: str) -> Recipe | None:
        if device.type == "cuda":
            try:
                found = _planned(job, recipe, device, live, changing)
            except SnugfitError:  # a GPU or a model that cannot be foreseen
                found = None
            if found is not None:
                return found
        return cut_smaller(job, recipe)

    return following


def _planned(
    job: Job, recipe: Recipe, device: torch.device, live: bool, changing: Collection[Slot]
) -> Recipe | None:
    import torch

    from snugfit.planning.search.search import plan
    from snugfit.prediction.predict import predict

    gpu = torch.cuda.get_device_name(device)
    needed = predict(job, recipe, gpu=gpu).needed_bytes
    fidelity = max((technique.fidelity for technique in recipe), key=list(Fidelity).index)
    found = plan(
        job,
        gpu=gpu,
        memory_bytes=int(needed * LESS),
        fidelity=fidelity,
        settled={slot: recipe[slot] for slot in Slot if slot not in changing},
        ranked=RANKED if live else 0,
        workers=1,  # none beside this process, which would import the user's script once more
    )
    if found.best is None:
        return None
    candidates = [Recipe.parse(choice.recipe) for choice in (found.ranked if live else (found.best,))]
    return next((each for each in candidates if not live or goes_on_live(each, recipe)), None)


def goes_on_live(following: Recipe, before: Recipe) -> bool:
    """Whether a model that stands and trains can go on so: its layers may be recomputed, and its loader's
    micro-batches cut, but not joined."""
    ours, theirs = following.setup(), before.setup()
    alike = replace(ours, checkpoint=theirs.checkpoint, micro_batches=theirs.micro_batches) == theirs
    return alike and ours.micro_batches >= theirs.micro_batches


def cut_smaller(job: Job, recipe: Recipe) -> Recipe | None:
    """The next finer cut of the batch; None when there is none."""
    finer = {
        cut.setup().micro_batches: cut
        for kind in roster.techniques()
        for technique in (kind.settings(job) if kind.slot is Slot.BATCHING else ())
        if (cut := recipe.with_(technique)).setup().micro_batches > recipe.setup().micro_batches
    }
    return finer[min(finer)] if finer else None
