"""Choice of the next recipe after an out-of-memory error: the same training in less memory.

A new plan for this GPU is made, with recipes at least as exact as the failed one. Its memory limit is below
the predicted need of the failed recipe and within the GPU's memory. With several GPUs the search is shorter,
because all of them wait for it. Optimizer, precision and adapters stay the same, since the states of a run
depend on them, so that the run can continue. If nothing can be predicted, the batch is split into more
micro-batches. This happens on the CPU, for an unknown GPU, or after a search without result.

The global batch never changes, and no result is less exact than the original recipe. If samples depend on
each other (`job/sample_mixing.py`), the number of micro-batches stays the same.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from snugfit.errors import SnugfitError
from snugfit.job.job import Job
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import job_of_rank, on_gpus
from snugfit.techniques.technique import Fidelity, Slot
from snugfit.training.recovery import PlanFailure, Replan

if TYPE_CHECKING:
    import torch

MEMORY_FACTOR = 0.9
"""Memory limit of the next recipe, as a share of the memory that was predicted for the failed one. The margin
of a tenth exceeds the error of any prediction (docs/accuracy.md), and most techniques save more."""

CHANGING = frozenset({Slot.ATTENTION, Slot.CHECKPOINTING, Slot.BATCHING, Slot.GRADIENTS, Slot.ALLOCATOR})
"""Slots (groups of alternative techniques) that may change during a run, because optimizer states do not
depend on them."""

RANKED = 32
"""Number of a plan's best recipes that are checked on a live model. Each check repeats a prediction, and only
recipes with fewer micro-batches are rejected."""


def next_recipe(
    device: torch.device, *, live: bool = False, changing: Collection[Slot] = CHANGING, gpus: int = 1
) -> Replan:
    """Return a function that chooses the next recipe after an out-of-memory error, or None.

    The function serves runs on this device, or on `gpus` such GPUs. The new recipe differs only in the slots
    (kinds of technique) in `changing`. With `live` the existing model can continue under it. The distribution
    over GPUs stays.
    """

    def following(job: Job, recipe: Recipe, cause: str) -> Recipe | PlanFailure | None:
        slots = frozenset(
            slot for slot in changing if _has_choice(slot, job) or not recipe[slot].is_searched()
        )
        if device.type == "cuda":
            try:
                if gpus == 1:
                    smaller = _plan_smaller(job, recipe, device, live, slots)
                else:
                    smaller = _plan_smaller_on_several(job, recipe, device, slots, gpus)
            except SnugfitError as unknown:  # the GPU or the model has no prediction
                return PlanFailure(recipe=cut(job, recipe), reason=str(unknown))
            if smaller is not None:
                return smaller
        return cut(job, recipe)

    def cut(job: Job, recipe: Recipe) -> Recipe | None:
        return cut_smaller(job_of_rank(job, on_gpus(recipe.setup(), gpus)), recipe)

    return following


def _has_choice(slot: Slot, job: Job) -> bool:
    """Return True if plans have a further technique than the default for this slot and job."""
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
    # The next recipe must not be less exact than the present one.
    fidelity = max((technique.fidelity for technique in recipe), key=list(Fidelity).index)
    smaller = plan(
        job,
        gpu=gpu,
        memory_bytes=at_most(needed * MEMORY_FACTOR, gpu),
        fidelity=fidelity,
        keep={slot: recipe[slot] for slot in Slot if slot not in changing},
        ranked=RANKED if live else 0,
        workers=1,  # no other process, because it would import the user's script again
    )
    if smaller.best is None:
        return None
    choices = smaller.ranked if live else (smaller.best,)
    candidates = (Recipe.parse(choice.recipe) for choice in choices)
    return next((other for other in candidates if not live or suits_live_model(other, recipe)), None)


SEARCHED_ON_SEVERAL = frozenset({Slot.CHECKPOINTING, Slot.BATCHING})
"""Slots (groups of alternative techniques) that may change and that plans for several GPUs search."""


def _plan_smaller_on_several(
    job: Job, recipe: Recipe, device: torch.device, changing: Collection[Slot], gpus: int
) -> Recipe | None:
    """Return a recipe from a plan that needs less memory on each of `gpus` GPUs, or None. Other processes
    compute the plan.
    """
    import torch

    from snugfit.job.gpu import find_gpu
    from snugfit.planning.several_gpus import group_plans

    smaller: Recipe | None = group_plans().smaller_on_several(
        job,
        recipe,
        gpu=find_gpu(torch.cuda.get_device_name(device)),
        gpus=gpus,
        searched=SEARCHED_ON_SEVERAL & frozenset(changing),
        share=MEMORY_FACTOR,
    )
    return smaller


def suits_live_model(following: Recipe, before: Recipe) -> bool:
    """Return True if a live model can continue under the new recipe.

    The recipe may recompute layers and split micro-batches further, but not join them.
    """
    return following.setup().can_follow(before.setup())


def cut_smaller(job: Job, recipe: Recipe) -> Recipe | None:
    """Return the recipe with the next larger number of micro-batches; None if there is none."""
    # Gradients of micro-batches are summed, so they cannot be released within the backward pass.
    whole = recipe.with_(roster.plain(Slot.GRADIENTS))
    finer = {
        cut.pieces: cut
        for kind in roster.techniques()
        for technique in (
            kind.settings(job) if kind.slot is Slot.BATCHING and not kind.planning_objection(job) else ()
        )
        if (cut := whole.with_(technique)).pieces > recipe.pieces
    }
    return finer[min(finer)] if finer else None
