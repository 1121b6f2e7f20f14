"""A loss or a gradient that is no number stops a fitted trainer before a weight has changed.

transformers goes on, logs a loss of 0 and leaves weights that are no numbers. Here the step's loss and the
norm of its gradients come to the host together, once a step; a gradient scaler's overflow is its own affair.

Nothing else of a step waits for the GPU. The Trainer by itself does so twice: for the copy of a batch, before
which the step before has to be done, and for the loss, at the end of the backward pass, as here.
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
    """Before a step's first micro-batch: what it would be taken back to. What stands of a step that has come
    to no update (an iterable dataset's end) goes."""
    if step.pending_micro_batches:
        trainer.model.zero_grad(set_to_none=True)
        loss_since_log(trainer).copy_(step.logged_loss_at_start)
        count = trainer.args.gradient_accumulation_steps
        trainer.snugfit.journal.warn_once(LEFT_OVER.format(n=step.pending_micro_batches, count=count))
    step.pending_micro_batches = len(step.batches)
    step.rng_at_step_start = rng_states(trainer.args.device)
    step.logged_loss_at_start = loss_since_log(trainer).clone()


def raise_if_non_finite(trainer: Any, run: FitRun, norm: Any) -> None:
    """Raises `SnugfitError` when this step's loss or norm is no number. Its batch is written down, and the
    boundary before it is kept as a checkpoint."""
    import torch

    step = run.step
    step.pending_micro_batches = 0
    if step.loss_sum is None:
        return
    total, tokens = step.loss_sum, run.timer.tokens
    run.backward.raise_if_updated()
    scalars = [total, torch.as_tensor(norm, device=total.device), total.new_full((), 0) + tokens]
    loss, size, count = torch.stack([scalar.float() for scalar in scalars]).tolist()
    if run.ranks.are_many:  # one that is no number makes the mean none, in all processes
        loss, count = run.ranks.sum([loss / run.ranks.size, count])
    step.figures = StepFigures(loss, size, int(count))
    has_scaler = trainer.accelerator.scaler is not None  # which leaves out what overflows
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
