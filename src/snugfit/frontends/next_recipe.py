"""What a run goes on with when memory ran out: the same training in less memory.

The plan for this GPU is asked once more, with less memory than the broken recipe is predicted to need, and no
more than the GPU has, at the recipe's own fidelity. Where several GPUs wait for it, a shorter search is made
(`planning/several_gpus/smaller.py`). What the states of a run depend on stays: the same optimizer, the same
precision, the same adapters; so whatever is found can be gone on with. Where nothing can be predicted (on the
CPU, for a GPU that is not in the table, when the search finds nothing) the batch is cut into more
micro-batches.

No answer changes the global batch, and none is less exact than what was asked for. Where samples look at each
other (`job/sample_mixing.py`) the batch is cut as it was.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from snugfit.errors import SnugfitError
from snugfit.job.job import Job
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import job_of_rank, on_gpus
from snugfit.techniques.technique import Fidelity, Slot
from snugfit.training.recovery import Replan, Unplanned

if TYPE_CHECKING:
    import torch

MEMORY_FACTOR = 0.9
"""Of the memory that the broken recipe is predicted to need, what the next may at most: a tenth is beyond any
error of a prediction (docs/accuracy.md), and less than most techniques save."""

CHANGING = frozenset({Slot.ATTENTION, Slot.CHECKPOINTING, Slot.BATCHING, Slot.GRADIENTS, Slot.ALLOCATOR})
"""Slots that may be filled otherwise when a run is built once more: its states do not depend on them."""

RANKED = 32
"""Recipes of a plan that are looked through for one that a live model can follow: each costs a replay, and
only those that join micro-batches are skipped."""


def next_recipe(
    device: torch.device, *, live: bool = False, changing: Collection[Slot] = CHANGING, gpus: int = 1
) -> Replan:
    """For runs on this device, or on so many such `gpus`: the recipe that follows one that ran out of memory,
    or None. One that differs in slots that are `changing` alone; for a model that is `live`, one that it can
    go on under as it is. How GPUs share the work stays."""

    def following(job: Job, recipe: Recipe, cause: str) -> Recipe | Unplanned | None:
        slots = frozenset(
            slot for slot in changing if _has_choice(slot, job) or not recipe[slot].is_searched()
        )
        if device.type == "cuda":
            try:
                if gpus == 1:
                    smaller = _plan_smaller(job, recipe, device, live, slots)
                else:
                    smaller = _plan_smaller_on_several(job, recipe, device, slots, gpus)
            except SnugfitError as unknown:  # a GPU or a model that cannot be predicted
                return Unplanned(recipe=cut(job, recipe), why=str(unknown))
            if smaller is not None:
                return smaller
        return cut(job, recipe)

    def cut(job: Job, recipe: Recipe) -> Recipe | None:
        return cut_smaller(job_of_rank(job, on_gpus(recipe.setup(), gpus)), recipe)

    return following


def _has_choice(slot: Slot, job: Job) -> bool:
    """Whether a plan may choose more than the default of this slot."""
    kinds = [kind for kind in roster.techniques() if kind.slot is slot and not kind.plain]
    return any(not kind.planning_objection(job) for kind in kinds)


def _plan_smaller(
    job: Job, recipe: Recipe, device: torch.device, live: bool, changing: Collection[Slot]
) -> Recipe | None:
    import torch

    from snugfit.frontends.predicted import predict_apart
    from snugfit.job.gpu import find_gpu
    from snugfit.planning.search.search import plan
    from snugfit.prediction.headroom import at_most

    gpu = find_gpu(torch.cuda.get_device_name(device))
    needed = predict_apart(job, recipe, gpu, 1).needed_bytes
    fidelity = max((technique.fidelity for technique in recipe), key=list(Fidelity).index)
    smaller = plan(
        job,
        gpu=gpu,
        memory_bytes=at_most(needed * MEMORY_FACTOR, gpu),
        fidelity=fidelity,
        keep={slot: recipe[slot] for slot in Slot if slot not in changing},
        ranked=RANKED if live else 0,
        workers=1,  # none beside this process, which would import the user's script once more
    )
    if smaller.best is None:
        return None
    choices = smaller.ranked if live else (smaller.best,)
    candidates = (Recipe.parse(choice.recipe) for choice in choices)
    return next((other for other in candidates if not live or suits_live_model(other, recipe)), None)


SEARCHED_ON_SEVERAL = frozenset({Slot.CHECKPOINTING, Slot.BATCHING})
"""Of the slots that may change, those that plans for several GPUs fill."""


def _plan_smaller_on_several(
    job: Job, recipe: Recipe, device: torch.device, changing: Collection[Slot], gpus: int
) -> Recipe | None:
    """By plans for so many GPUs, which other processes rehearse."""
    import torch

    from snugfit.job.gpu import find_gpu
    from snugfit.planning.several_gpus.smaller import smaller_on_several

    return smaller_on_several(
        job,
        recipe,
        gpu=find_gpu(torch.cuda.get_device_name(device)),
        gpus=gpus,
        searched=SEARCHED_ON_SEVERAL & frozenset(changing),
        share=MEMORY_FACTOR,
    )


def suits_live_model(following: Recipe, before: Recipe) -> bool:
    """Whether a model that stands and trains can go on so: its layers may be recomputed, and its loader's
    micro-batches cut, but not joined."""
    new, old = following.setup(), before.setup()
    alike = replace(new, checkpoint=old.checkpoint, micro_batches=old.micro_batches) == old
    return alike and new.micro_batches >= old.micro_batches


def cut_smaller(job: Job, recipe: Recipe) -> Recipe | None:
    """The next finer cut of the batch, whose gradients are kept until they are sums; None when there is
    none."""
    whole = recipe.with_(roster.plain(Slot.GRADIENTS))
    finer = {
        cut.setup().micro_batches: cut
        for kind in roster.techniques()
        for technique in (
            kind.settings(job) if kind.slot is Slot.BATCHING and not kind.planning_objection(job) else ()
        )
        if (cut := whole.with_(technique)).setup().micro_batches > recipe.setup().micro_batches
    }
    return finer[min(finer)] if finer else None
