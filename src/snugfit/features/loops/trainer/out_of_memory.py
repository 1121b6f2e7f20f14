"""Repetition of a step of a Trainer under `fit`, with a recipe of less memory, when memory runs out.

The next recipe is planned as for any run (`next_recipe.py`), within the limits of an existing model. It may
recompute layers, and split micro-batches further. The loader is unchanged, and each of its micro-batches is
split here. So the global batch stays, and no sample is lost or repeated. The failed step is repeated from its
beginning: its partial gradients are dropped and the random generators restored. A failed update has changed
weights and is not repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from snugfit.features.loops.trainer.setup import change_recipe
from snugfit.frontends.next_recipe import cut_smaller
from snugfit.training.checkpoint.state import release_unused_memory
from snugfit.training.recovery import WHAT_TO_TRY, Exhausted, out_of_memory, short_of_memory
from snugfit.training.rng import set_rng_states

if TYPE_CHECKING:
    from snugfit.errors import OutOfMemory
    from snugfit.features.loops.trainer.fit_run import FitPlan, FitRun


SEVERAL_GPUS_ADVICE = "With several GPUs a run does not continue by itself under another recipe."


def retry_step(trainer: Any, run: FitRun, cause: str, message: str) -> None:
    """Restart the step under the next recipe, after memory ran out in the forward or backward pass.

    Raises `OutOfMemory` if there is no next recipe. It also raises it in distributed training, where other
    processes wait for collectives.
    """
    if run.ranks.are_many:
        exhausted = Exhausted(cause=cause, phase="gradients", message=message)
        text = f"It was rank {run.ranks.rank}. {SEVERAL_GPUS_ADVICE} {WHAT_TO_TRY}"
        raise out_of_memory(exhausted, trainer.snugfit.recipe, trainer.state.global_step, text)
    trainer.model.zero_grad(set_to_none=True)
    number = trainer.state.global_step + 1
    exhausted = Exhausted(cause=cause, phase="gradients", message=message)
    change = f"Memory ran out in step {number} ({cause}). The step is repeated with the recipe"
    _switch_recipe(trainer, run, exhausted, number, change)
    # The repeated step uses the same random numbers as the failed one.
    set_rng_states(run.step.rng_at_step_start, trainer.args.device)


def switch_to_smaller(trainer: Any, run: FitRun) -> None:
    """Switch to a recipe with less memory, if there is one. It is called after a step that was slow because
    the allocator often had to free its cache.
    """
    number, exhausted = trainer.state.global_step + 1, short_of_memory()
    change = (
        f"Memory is too tight ({exhausted.cause} in several steps in a row). From step {number} the recipe is"
    )
    _switch_recipe(trainer, run, exhausted, number, change)


def _switch_recipe(trainer: Any, run: FitRun, exhausted: Exhausted, number: int, change: str) -> None:
    """Switch the trainer to the next recipe from step `number` on. `change` describes the change in the
    training log.
    """
    plan: FitPlan = trainer.snugfit
    # Recorded passes hold memory, and are those of the old recipe.
    run.passes = None
    release_unused_memory(trainer.args.device)
    chosen = run.recovery.next_recipe(exhausted, plan.recipe, number - 1)
    if chosen is None:
        run.logger.ignore_retries()
        return
    change_recipe(trainer, chosen)
    text = f"{change} '{chosen}'. The global batch stays {plan.job.batch_size}."
    run.recovery.record_change(exhausted, plan.recipe, chosen, number, text=text)
    run.logger.restart(plan.job, chosen)
    run.logger.watch_retries()


def update_broke(trainer: Any, cause: str, error: BaseException) -> OutOfMemory:
    """Return the error for memory that ran out during an optimizer update, which cannot be repeated."""
    plan: FitPlan = trainer.snugfit
    smaller = cut_smaller(plan.job, plan.recipe)
    cure = f" Resume with a recipe that needs less memory, such as '{smaller}'." if smaller else ""
    exhausted = Exhausted(cause=cause, phase="update", message=str(error))
    return out_of_memory(
        exhausted, plan.recipe, trainer.state.global_step, f"The step cannot be repeated.{cure}"
    )
