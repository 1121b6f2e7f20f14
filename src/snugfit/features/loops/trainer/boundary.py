"""Work at the end of a Trainer's step under `fit`: requested checkpoints, stops, and interrupted evaluations.

After a step the Trainer logs, evaluates and saves, in this order, and again at an epoch's end. A signal may
arrive during each of these. A checkpoint of the current step is then saved without waiting for an evaluation.
It contains the Trainer's state and the random generators from before that evaluation, and marks it as
pending. A resumed run evaluates first. After a stop within an epoch, the Trainer does not process the epoch's
end until the run is resumed.

After a NaN loss, transformers continues, logs a loss of 0 and leaves NaN weights. Here the loss and gradient
norm are copied to the host together, once a step, and checked. Overflows of a gradient scaler are handled by
the scaler.

Nothing else in a step waits for the GPU. The plain Trainer waits twice. It waits for the copy of a batch,
which follows the whole previous step. It also waits for the loss at the end of the backward pass, as here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError
from snugfit.features.loops.pieces import join_pieces, write_batch
from snugfit.features.loops.trainer.live_trainer import loss_since_log
from snugfit.features.loops.trainer.out_of_memory import switch_to_smaller
from snugfit.features.loops.trainer.plan import compared_job
from snugfit.features.loops.trainer.step_timer import StepFigures
from snugfit.training.interrupt import EvaluationStopped
from snugfit.training.rng import rng_states, set_rng_states
from snugfit.training.run.loop import NonFinite

if TYPE_CHECKING:
    from snugfit.features.loops.trainer.fit_run import FitRun
    from snugfit.features.loops.trainer.step_timer import StepState
    from snugfit.features.loops.trainer.trainer_hooks import StepEnd
    from snugfit.job.job import Job


def compare_again(trainer: Any, run: FitRun) -> None:
    """Before some of the steps, compare the gradients of micro-batches with those of the whole batch.

    If the micro-batches are padded to different lengths, another batch from the loader is compared instead.
    """
    plan = trainer.snugfit
    run.steps += 1
    cuts = plan.max_rows is not None or len(run.step.batches) > 1
    if not cuts or run.ranks.are_many:
        return

    def compare(job: Job) -> Job:
        batch = join_pieces(run.step.batches, job.model.batch_dims) or plan.samples
        return compared_job(trainer, job, batch, pieces=plan.recipe.pieces, again=True)

    run.recovery.compare_again(plan.recipe, run.steps - 1, compare)
    trainer.snugfit = replace(plan, job=run.recovery.job)


def end_step(trainer: Any, run: FitRun, figures: StepEnd, go_on: Callable[[StepEnd], None]) -> None:
    """At the end of a step or epoch, write the log line. Then call `go_on`, with which the Trainer logs,
    evaluates and saves.
    """
    interrupts, step = run.checkpoints.interrupts, trainer.state.global_step
    ended = run.timer.write(trainer, run.logger, run.step, figures.learning_rate)
    if figures.learning_rate is None:  # this process had no step in this epoch
        figures = run.checkpoints.state.last_figures or figures
    run.checkpoints.state.last_figures = figures
    # The Trainer calls this at the end of a step, and again at the end of its epoch.
    is_of_epoch, run.last_boundary = run.last_boundary == step, step
    if is_of_epoch and run.is_stopped:
        return
    if not ended and not trainer.control.should_training_stop:
        run.data.end_epoch()
    run.checkpoints.check_first_update()
    interrupts.agree()
    wants_save = interrupts.wants_checkpoint()
    _stop_if_requested(trainer, run)
    try:
        go_on(figures)
    except EvaluationStopped:
        _stop_if_requested(trainer, run)
        run.checkpoints.state.rewind_evaluation()
    if (wants_save or run.is_stopped) and not run.checkpoints.is_saved:
        trainer.save_now()
    goes_on = ended and not trainer.control.should_training_stop
    if goes_on and not run.ranks.are_many and run.logger.is_thrashing():
        switch_to_smaller(trainer, run)


def _stop_if_requested(trainer: Any, run: FitRun) -> None:
    if run.checkpoints.interrupts.stopping is not None:
        run.is_stopped = trainer.control.should_training_stop = True


def evaluate(run: FitRun, go_on: Callable[[], Any]) -> Any:
    """Run the Trainer's own evaluation. Raises `EvaluationStopped` at a signal before or during it.

    In distributed training the evaluation is finished, because each process waits for the others' results.
    """
    interrupts = run.checkpoints.interrupts
    run.checkpoints.state.note_before_evaluation()
    if not run.ranks.are_many:
        interrupts.raise_if_stopping()
    interrupts.watch_modules(lambda module: interrupts.raise_if_stopping())
    try:
        # The evaluation's collate function may share a generator with the training data, which must not
        # advance.
        with run.data.rng.preserve():
            return go_on()
    finally:
        interrupts.watch_modules(None)


def repeat_evaluation(trainer: Any, run: FitRun) -> None:
    """Run the evaluation that a signal interrupted before the checkpoint from which this run resumed."""
    run.last_boundary = trainer.state.global_step
    pending = run.checkpoints.state.unevaluated
    if pending is None:
        return
    try:
        trainer.repeat_boundary(save=pending["save"], ignored_keys=run.ignored_keys)
    except EvaluationStopped:
        _stop_if_requested(trainer, run)
    run.checkpoints.state.note_generators()


# ---- start of a step, and its check before the update -----------------------------------------------------


PARTIAL_BATCH_WARNING = (
    "The data of an epoch ends within a batch: the last {n} of {count} micro-batches are left out, because "
    "they do not fill a step. transformers would add their gradients to the first step of the next epoch."
)


def begin_step(trainer: Any, step: StepState) -> None:
    """Save the training state before a step's first micro-batch; a failed step restores it.

    Gradients that an earlier step left without an update (at an iterable dataset's end) are dropped.
    """
    if step.pending_micro_batches:
        trainer.model.zero_grad(set_to_none=True)
        # The Trainer has already added the losses of the failed pass to its sum.
        loss_since_log(trainer).copy_(step.logged_loss_at_start)
        count = trainer.args.gradient_accumulation_steps
        trainer.snugfit.journal.warn_once(
            PARTIAL_BATCH_WARNING.format(n=step.pending_micro_batches, count=count)
        )
    step.pending_micro_batches = len(step.batches)
    step.rng_at_step_start = rng_states(trainer.args.device)
    step.logged_loss_at_start = loss_since_log(trainer).clone()


def raise_if_non_finite(trainer: Any, run: FitRun, norm: Any) -> None:
    """Raise `SnugfitError` when this step's loss or gradient norm is NaN or infinite."""
    import torch

    step = run.step
    step.pending_micro_batches = 0
    if step.loss_sum is None:
        return
    total, tokens = step.loss_sum, run.timer.tokens
    run.backward.raise_if_updated()
    # One transfer for all three scalars, because each transfer waits for the device.
    scalars = [total, torch.as_tensor(norm, device=total.device), total.new_full((), 0) + tokens]
    loss, size, count = torch.stack([scalar.float() for scalar in scalars]).tolist()
    if run.ranks.are_many:  # a NaN in one process makes the mean NaN in all
        loss, count = run.ranks.sum([loss / run.ranks.size, count])
    step.figures = StepFigures(loss, size, int(count))
    has_scaler = trainer.accelerator.scaler is not None  # the gradient scaler skips steps that overflow
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
    raise run.ranks.common_error(
        SnugfitError(
            f"Step {number}: {NonFinite(loss, size)} The step's batch is in {file}.{of_all} Look at it, or "
            "use a smaller learning rate or another precision."
        )
    )
