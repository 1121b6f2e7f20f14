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
from snugfit.frontends.trainer.setup import rewrap
from snugfit.techniques.technique import Slot
from snugfit.training.checkpoint.state import free_unused
from snugfit.training.generators import preserve_generators, set_generators
from snugfit.training.thrash import CAUSE

if TYPE_CHECKING:
    from snugfit.frontends.trainer.fit_plan import FitPlan
    from snugfit.frontends.trainer.step_logger import Lines
    from snugfit.frontends.trainer.step_state import StepState
    from snugfit.techniques.recipe import Recipe


def take_again(trainer: Any, state: StepState, logger: Lines, cause: str, message: str) -> None:
    """After memory ran out in the forward or the backward pass: the step's beginning again, under the next
    recipe. Raises `OutOfMemory` when there is none."""
    step, plan = trainer.state.global_step + 1, trainer.snugfit
    trainer.model.zero_grad(set_to_none=True)
    free_unused(trainer.args.device)
    chosen = _next(trainer, cause)
    if chosen is None:
        raise OutOfMemory(
            f"Memory ran out in step {step} ({cause}) under '{plan.recipe}', and its batch of"
            f" {plan.job.batch_size} is cut into single samples already. {message.splitlines()[0]}"
        )
    what = f"Memory ran out in step {step} ({cause}): it is taken again under '{chosen}'"
    _go_on_under(trainer, logger, chosen, step, cause, what)
    set_generators(state.rng_at_step_start, trainer.args.device)


def go_on_with_less(trainer: Any, logger: Lines) -> None:
    """At a border, when memory is so short that steps crawl: the next step under the next recipe, if there is
    one."""
    step, plan = trainer.state.global_step, trainer.snugfit
    chosen = _next(trainer, CAUSE)
    if chosen is None:
        text = f"Memory is short ({CAUSE}) under '{plan.recipe}', and no other recipe is left."
        plan.notices.warn_once(text)
        logger.stays_short()
        return
    what = f"Memory is short ({CAUSE} in step after step): from step {step + 1} on it is '{chosen}'"
    free_unused(trainer.args.device)
    _go_on_under(trainer, logger, chosen, step + 1, CAUSE, what)


def _next(trainer: Any, cause: str) -> Recipe | None:

    plan: FitPlan = trainer.snugfit
    changing = {Slot.BATCHING, Slot.CHECKPOINTING} - (plan.user_slots - {Slot.BATCHING})
    device = trainer.args.device
    with preserve_generators(device):
        return next_recipe(device, live=True, changing=changing)(plan.job, plan.recipe, cause)


def _go_on_under(trainer: Any, logger: Lines, chosen: Recipe, step: int, cause: str, what: str) -> None:
    plan: FitPlan = trainer.snugfit
    under(trainer, chosen)
    text = f"{what}; the global batch stays {plan.job.batch_size}."
    before, after = str(plan.recipe), str(chosen)
    plan.notices.tell("replanned", step=step, cause=cause, before=before, recipe=after, text=text)
    logger.goes_on()


def under(trainer: Any, recipe: Recipe) -> None:
    """The live model and the micro-batches that are still to come, under this recipe."""
    if recipe[Slot.CHECKPOINTING] != trainer.snugfit.recipe[Slot.CHECKPOINTING]:
        rewrap(trainer, recipe)
    trainer.snugfit = trainer.snugfit.cut_finer(recipe)


def broke_in_the_update(trainer: Any, cause: str, error: BaseException) -> OutOfMemory:
    """What to say when memory ran out where a step cannot be taken again."""
    plan: FitPlan = trainer.snugfit
    following = cut_smaller(plan.job, plan.recipe)
    try_this = f" Resume under a recipe that needs less, such as '{following}'." if following else ""
    return OutOfMemory(
        f"Memory ran out ({cause}) in step {trainer.state.global_step + 1} under '{plan.recipe}', outside"
        f" of its forward and backward passes, and the step cannot be taken again.{try_this}"
        f" {str(error).splitlines()[0]}"
    )
