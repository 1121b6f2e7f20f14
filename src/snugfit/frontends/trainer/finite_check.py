"""Stop a fitted trainer before a NaN or infinite loss or gradient changes a weight.

transformers continues, logs a loss of 0 and leaves NaN weights. Here the step's loss and the norm of its
gradients are copied to the host together, once a step. Overflows of a gradient scaler are handled by the
scaler.

Nothing else in a step waits for the GPU. The plain Trainer waits twice. It waits for the copy of a batch,
which follows the whole previous step. It also waits for the loss at the end of the backward pass, as here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError
from snugfit.frontends.items import write_batch
from snugfit.frontends.trainer.step_state import StepFigures
from snugfit.step.transformers_internals import loss_since_log
from snugfit.training.rng import rng_states, set_rng_states
from snugfit.training.run.loop import NonFinite

if TYPE_CHECKING:
    from snugfit.frontends.trainer.fit_run import FitRun
    from snugfit.frontends.trainer.step_state import StepState


LEFT_OVER = (
    "The data of an epoch ends within a batch: the last {n} of {count} micro-batches are left out, because "
    "they do not fill a step. transformers would add their gradients to the first step of the next epoch."
)


def begin_step(trainer: Any, step: StepState) -> None:
    """Save the state to which a step returns, before its first micro-batch.

    Gradients of an earlier step without an update (an iterable dataset's end) are dropped.
    """
    if step.pending_micro_batches:
        trainer.model.zero_grad(set_to_none=True)
        loss_since_log(trainer).copy_(step.logged_loss_at_start)
        count = trainer.args.gradient_accumulation_steps
        trainer.snugfit.journal.warn_once(LEFT_OVER.format(n=step.pending_micro_batches, count=count))
    step.pending_micro_batches = len(step.batches)
    step.rng_at_step_start = rng_states(trainer.args.device)
    step.logged_loss_at_start = loss_since_log(trainer).clone()


def raise_if_non_finite(trainer: Any, run: FitRun, norm: Any) -> None:
    """Raise `SnugfitError` when this step's loss or norm is NaN or infinite.

    Its batch is written to disk, and a checkpoint from before the step is saved.
    """
    import torch

    step = run.step
    step.pending_micro_batches = 0
    if step.loss_sum is None:
        return
    total, tokens = step.loss_sum, run.timer.tokens
    run.backward.raise_if_updated()
    scalars = [total, torch.as_tensor(norm, device=total.device), total.new_full((), 0) + tokens]
    loss, size, count = torch.stack([scalar.float() for scalar in scalars]).tolist()
    if run.ranks.are_many:  # one NaN makes the mean NaN, in all processes
        loss, count = run.ranks.sum([loss / run.ranks.size, count])
    step.figures = StepFigures(loss, size, int(count))
    has_scaler = trainer.accelerator.scaler is not None  # the scaler skips overflows
    if math.isfinite(loss) and (has_scaler or math.isfinite(size)):
        return
    trainer.model.zero_grad(set_to_none=True)
    number = trainer.state.global_step + 1
    file = write_batch(run.checkpoints.root, number, step.batches, rank=run.ranks.rank)
    set_rng_states(step.rng_at_step_start, trainer.args.device)
    loss_since_log(trainer).copy_(step.logged_loss_at_start)
    run.data.unuse(len(step.batches))
    run.checkpoints.save()
    run.checkpoints.wait()
    of_all = " Those of other processes have their numbers." if run.ranks.are_many else ""
    raise run.ranks.alike(
        SnugfitError(
            f"Step {number}: {NonFinite(loss, size)} The step's batch is in {file}.{of_all} Look at it, or "
            "use a smaller learning rate or another precision."
        )
    )
