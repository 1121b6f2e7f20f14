"""When memory runs out in a fitted trainer's step, the same step is taken again with less.

What follows is planned as for any run (`next_recipe.py`), as far as a live model can follow: layers that are
recomputed from here on, and micro-batches that are cut finer. The loader goes on as it was; each micro-batch
that it brings is cut here. So the global batch is kept, no sample is lost or seen twice, and the step that
broke is taken again from its beginning: its partial gradients are dropped and the random generators put back.
An update that breaks has changed weights and is not taken again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from snugfit.errors import OutOfMemory
from snugfit.frontends.next_recipe import cut_smaller, next_recipe
from snugfit.frontends.trainer.setup import checkpoint
from snugfit.techniques.technique import Slot
from snugfit.training.checkpoint.state import free_unused
from snugfit.training.generators import set_generators
from snugfit.training.thrash import CAUSE

if TYPE_CHECKING:
    from snugfit.frontends.trainer.fitted import Fitted
    from snugfit.techniques.recipe import Recipe


def take_again(trainer: Any, fitted: Fitted, cause: str, message: str) -> None:
    """After memory ran out in the forward or the backward pass: the step's beginning again, under the next
    recipe. Raises `OutOfMemory` when there is none."""
    step, before = trainer.state.global_step + 1, fitted.recipe
    trainer.model.zero_grad(set_to_none=True)
    free_unused(trainer.args.device)
    chosen = _next(trainer, fitted, cause)
    if chosen is None:
        raise OutOfMemory(
            f"Memory ran out in step {step} ({cause}) under '{before}', and its batch of"
            f" {fitted.job.batch_size} is cut into single samples already. {message.splitlines()[0]}"
        )
    what = f"Memory ran out in step {step} ({cause}): it is taken again under '{chosen}'"
    _go_on_under(trainer, fitted, chosen, step, cause, what)
    set_generators(fitted.began, trainer.args.device)


def go_on_with_less(trainer: Any, fitted: Fitted) -> None:
    """At a border, when memory is so short that steps crawl: the next step under the next recipe, if there is
    one."""
    step, before = trainer.state.global_step, fitted.recipe
    chosen = _next(trainer, fitted, CAUSE)
    if chosen is None:
        fitted.warn_once(f"Memory is short ({CAUSE}) under '{before}', and no other recipe is left.")
        fitted.told_of.stays_short()
        return
    what = f"Memory is short ({CAUSE} in step after step): from step {step + 1} on it is '{chosen}'"
    free_unused(trainer.args.device)
    _go_on_under(trainer, fitted, chosen, step + 1, CAUSE, what)


def _next(trainer: Any, fitted: Fitted, cause: str) -> Recipe | None:
    from snugfit.frontends.trainer.job import same_generators

    changing = {Slot.BATCHING, Slot.CHECKPOINTING} - (fitted.left - {Slot.BATCHING})
    device = trainer.args.device
    with same_generators(device):
        return next_recipe(device, live=True, changing=changing)(fitted.job, fitted.recipe, cause)


def _go_on_under(trainer: Any, fitted: Fitted, chosen: Recipe, step: int, cause: str, what: str) -> None:
    before = fitted.recipe
    under(trainer, fitted, chosen)
    text = f"{what}; the global batch stays {fitted.job.batch_size}."
    fitted.tell("replanned", step=step, cause=cause, before=str(before), recipe=str(chosen), text=text)
    fitted.told_of.goes_on()


def under(trainer: Any, fitted: Fitted, recipe: Recipe) -> None:
    """The live model and the micro-batches that are still to come, under this recipe."""
    before, setup = fitted.recipe.setup(), recipe.setup()
    if setup.checkpoint != before.checkpoint:
        checkpoint(trainer, setup)
    fitted.cut(recipe)


def broke_in_the_update(trainer: Any, fitted: Fitted, cause: str, error: BaseException) -> OutOfMemory:
    """What to say when memory ran out where a step cannot be taken again."""
    following = cut_smaller(fitted.job, fitted.recipe)
    try_this = f" Resume under a recipe that needs less, such as '{following}'." if following else ""
    return OutOfMemory(
        f"Memory ran out ({cause}) in step {trainer.state.global_step + 1} under '{fitted.recipe}', outside"
        f" of its forward and backward passes, and the step cannot be taken again.{try_this}"
        f" {str(error).splitlines()[0]}"
    )
