"""The end of a fitted trainer's step: requested checkpoints and stops, and abandoned evaluations.

After a step the Trainer logs, evaluates and saves, in this order, and again at an epoch's end. A signal may
arrive at any of these moments. A checkpoint of the current step is then saved without waiting for an
evaluation. It contains the Trainer's state and the random generators from before that evaluation, and marks
it as pending. A resumed run evaluates first. After a stop within an epoch, its end is not processed until the
run is resumed there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from snugfit.frontends.items import join_pieces
from snugfit.frontends.trainer.out_of_memory import go_on_with_less
from snugfit.frontends.trainer.plan import compared_job
from snugfit.training.interrupt import EvaluationStopped

if TYPE_CHECKING:
    from snugfit.frontends.trainer.fit_run import FitRun
    from snugfit.job.job import Job
    from snugfit.step.trainer_hooks import StepEnd


def compare_again(trainer: Any, run: FitRun) -> None:
    """Compare the micro-batches of a step with the whole batch, before some of the steps.

    If they are padded to different lengths, the example is compared again instead.
    """
    plan = trainer.snugfit
    run.steps += 1
    cuts = plan.max_rows is not None or len(run.step.batches) > 1
    if not cuts or run.ranks.are_many:
        return

    def compare(job: Job) -> Job:
        batch = join_pieces(run.step.batches, job.model.batch_dims) or plan.samples
        return compared_job(trainer, job, batch, pieces=plan.recipe.setup().micro_batches, again=True)

    run.recovery.compare_again(plan.recipe, run.steps - 1, compare)
    trainer.snugfit = replace(plan, job=run.recovery.job)


def end_step(trainer: Any, run: FitRun, figures: StepEnd, go_on: Callable[[StepEnd], None]) -> None:
    """Finish a step or an epoch; `go_on` logs, evaluates and saves as the Trainer does."""
    interrupts, step = run.checkpoints.interrupts, trainer.state.global_step
    ended = run.timer.write(trainer, run.logger, run.step, figures.learning_rate)
    if figures.learning_rate is None:  # this process had no step in the epoch
        figures = run.checkpoints.state.last_figures or figures
    run.checkpoints.state.last_figures = figures
    is_of_epoch, run.last_boundary = run.last_boundary == step, step
    if is_of_epoch and run.is_stopped:
        return
    if not ended and not trainer.control.should_training_stop:
        run.data.end_epoch()
    run.checkpoints.check_first_update()
    interrupts.agree()
    asked = interrupts.wants_checkpoint()
    _stop_where_asked(trainer, run)
    try:
        go_on(figures)
    except EvaluationStopped:
        _stop_where_asked(trainer, run)
        run.checkpoints.state.rewind_evaluation()
    if (asked or run.is_stopped) and not run.checkpoints.is_saved:
        trainer.save_now()
    goes_on = ended and not trainer.control.should_training_stop
    if goes_on and not run.ranks.are_many and run.logger.is_thrashing():
        go_on_with_less(trainer, run)


def _stop_where_asked(trainer: Any, run: FitRun) -> None:
    if run.checkpoints.interrupts.stopping is not None:
        run.is_stopped = trainer.control.should_training_stop = True


def evaluate(run: FitRun, go_on: Callable[[], Any]) -> Any:
    """Run the Trainer's own evaluation. Raises `EvaluationStopped` at a signal before or during it.

    Several processes finish it, because each waits for the results of the others.
    """
    interrupts = run.checkpoints.interrupts
    run.checkpoints.state.note_before_evaluation()
    if not run.ranks.are_many:
        interrupts.raise_if_stopping()
    interrupts.watch_modules(lambda module: interrupts.raise_if_stopping())
    try:
        with run.data.rng.apart():
            return go_on()
    finally:
        interrupts.watch_modules(None)


def repeat_evaluation(trainer: Any, run: FitRun) -> None:
    """Run the evaluation that was abandoned before a resume."""
    run.last_boundary = trainer.state.global_step
    pending = run.checkpoints.state.unevaluated
    if pending is None:
        return
    try:
        trainer.repeat_boundary(save=pending["save"], ignored_keys=run.ignored_keys)
    except EvaluationStopped:
        _stop_where_asked(trainer, run)
    run.checkpoints.state.note_generators()
