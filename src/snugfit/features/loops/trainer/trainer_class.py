"""The class that `fit` inserts before a trainer's own class: it applies settings that `TrainingArguments` do
not have.

`fitted_class(type(trainer))` is a class of the same name. Its methods override those of the user's class and
of transformers. Each adds its part and calls `super()`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from snugfit.errors import SnugfitError
from snugfit.features.loops.loader import renew_workers
from snugfit.features.loops.pieces import pieces_of
from snugfit.features.loops.trainer.boundary import (
    begin_step,
    compare_again,
    end_step,
    evaluate,
    raise_if_non_finite,
    repeat_evaluation,
)
from snugfit.features.loops.trainer.fit_run import FitPlan, FitRun, open_run
from snugfit.features.loops.trainer.live_trainer import average_losses_over_all_steps, weigh_losses_ourselves
from snugfit.features.loops.trainer.loss import (
    has_user_loss,
    problem_of_model_loss,
    problem_of_users_loss,
    share_of,
    track_use,
    weigh_among_all,
)
from snugfit.features.loops.trainer.out_of_memory import retry_step, update_broke
from snugfit.features.loops.trainer.parts import trainer_parts
from snugfit.features.loops.trainer.ranks import with_some_item
from snugfit.features.loops.trainer.setup import brings_optimizer, optimizer_for
from snugfit.features.loops.trainer.trainer_hooks import StepEnd, bases_that_keep
from snugfit.step.applier import forward_context, run_context, set_process
from snugfit.step.clipping import tensor_parts
from snugfit.step.memory_errors import memory_cause
from snugfit.techniques.technique import Slot
from snugfit.training.interrupt import EXIT_CODES, EvaluationStopped
from snugfit.training.run.loader import Prefetcher
from snugfit.training.run.trained import FINISHED, STOPPED

if TYPE_CHECKING:
    import torch
    from transformers import Trainer
else:
    Trainer = object  # at run time, `fitted_class` adds the user's class as a base


def fitted_class(base: type[Any]) -> type[Any]:
    """Return a subclass of the trainer's class that trains under the recipe in `trainer.snugfit`."""
    bases = (FittedTrainer, *bases_that_keep(base))
    return type(base.__name__, bases, {"__module__": __name__, "__doc__": base.__doc__})


class FittedTrainer(Trainer):  # type: ignore[misc]
    """Methods that override those of the user's Trainer, so that it trains under a recipe."""

    snugfit: FitPlan
    """Job, recipe and training log of the trainer. They are replaced by those of another recipe when memory
    runs out.
    """

    snugfit_run: FitRun | None
    """The state of the running `train()` call; None outside of one."""

    control: Any
    """The Trainer's own `TrainerControl`."""

    model: Any
    optimizer: Any

    @property
    def _fit_run(self) -> FitRun:
        assert self.snugfit_run is not None, "outside of train()"
        return self.snugfit_run

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **keywords: Any
    ) -> Any:
        """Run the trainer's own `train()` under the recipe, with its output folder locked."""
        setup = self.snugfit.recipe.setup()
        set_process(setup, self.args.device)
        with (
            run_context(setup, self.snugfit.user_slots),
            # The Trainer's filter would hide NaN losses. Stateful callbacks keep their state on resuming.
            patch.multiple(
                self.args, logging_nan_inf_filter=False, restore_callback_states_from_checkpoint=True
            ),
            patch.object(self.accelerator.dataloader_config, "non_blocking", _is_page_locked(self.args)),
            open_run(self, resume_from_checkpoint) as run,
        ):
            if run.checkpoints.finished is not None:
                return run.checkpoints.finished
            # `trial` and this argument follow `resume_from_checkpoint`.
            run.ignored_keys = keywords.get("ignore_keys_for_eval", (*arguments, None, None)[1])
            resumed, done = run.checkpoints.resumed, None
            with _name_memory_errors(self), run.checkpoints.state.train_begin_freezes_nothing():
                with contextlib.suppress(EvaluationStopped):  # stopped before the first step
                    done = super().train(str(resumed.folder) if resumed else None, *arguments, **keywords)
            stopped = run.checkpoints.interrupts.stopping
            outcome = FINISHED if stopped is None else STOPPED
            run.logger.end(outcome, self.state.global_step, in_words=True)
            if stopped is None:
                run.checkpoints.finish(done)
        if stopped is not None:
            raise SystemExit(EXIT_CODES[stopped])
        return done

    def create_optimizer(self, *arguments: Any, **keywords: Any) -> Any:
        """Create the recipe's optimizer, with the user's hyperparameters, or return the user's own."""
        plan = self.snugfit
        if self.optimizer is not None or Slot.OPTIMIZER in plan.user_slots or brings_optimizer(self):
            return super().create_optimizer(*arguments, **keywords)
        self.optimizer = optimizer_for(self, plan.recipe.setup().optimizer)
        return self.optimizer

    def get_eval_dataloader(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the trainer's own evaluation loader, with new workers."""
        loader = super().get_eval_dataloader(*arguments, **keywords)
        renew_workers(loader)
        return loader

    def get_batch_samples(self, epoch_iterator: Any, *arguments: Any, **keywords: Any) -> Any:
        """Return the micro-batches of one optimizer step, which the Trainer passes to `training_step`."""
        run, get_batch_samples = self._fit_run, super().get_batch_samples

        def fetch() -> Any:
            with run.timer.fetching(), run.data.rng.drawing():
                return get_batch_samples(epoch_iterator, *arguments, **keywords)

        run.timer.begin()
        # Each epoch has an iterator of its own.
        if run.prefetcher is None or run.epoch_iterator is not epoch_iterator:
            run.prefetcher, run.epoch_iterator = Prefetcher(fetch), epoch_iterator
        run.prefetcher.make = fetch
        samples, items = run.prefetcher.take()
        run.timer.count(samples, self.snugfit.job.model.batch_dims)
        run.data.use(len(samples))
        run.step = run.step.following(samples)
        return samples, items

    def training_step(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        """Train on one micro-batch, and return its loss, weighted by its fraction of the step's labels.

        When memory runs out, repeat the step so far under a smaller recipe. The result is then the difference
        to the losses returned before.
        """
        run, step = self._fit_run, self._fit_run.step
        if step.micro_batch_index == 0:
            begin_step(self, step)
            weigh_among_all(self, step, run.ranks)
            compare_again(self, run)
            run.backward.begin(self.model)
        step.micro_batch_index += 1
        given, todo = step.loss_sum, [inputs]
        while True:
            exhausted = None
            try:
                losses = self._losses(model, todo, *arguments, **keywords)
            except Exception as error:
                exhausted = memory_cause(error), str(error)
                if exhausted[0] is None:
                    raise
            # Outside of the except block, the traceback no longer keeps tensors of the failed pass alive.
            if exhausted is None:
                break
            retry_step(self, run, str(exhausted[0]), exhausted[1])
            # The gradients of earlier micro-batches were dropped too, so all micro-batches are repeated.
            step.loss_sum, todo = None, step.batches[: step.micro_batch_index]
        before, step.loss_sum = step.loss_sum, losses if step.loss_sum is None else step.loss_sum + losses
        return losses if before is not None or given is None else losses - given

    def _losses(self, model: Any, batches: list[Any], *arguments: Any, **keywords: Any) -> Any:
        """Run the forward and backward pass of these micro-batches, split further if the recipe has more
        micro-batches. Return the sum of their weighted losses.

        A micro-batch without counted items is skipped, because the mean over nothing is NaN.
        """
        import torch

        run = self._fit_run
        step = run.step
        total = torch.zeros((), device=self.args.device)
        weigh_losses_ourselves(self)
        for index, batch in enumerate(batches, start=step.micro_batch_index - len(batches)):
            for piece in pieces_of(batch, self.snugfit.max_rows, self.snugfit.job.model.batch_dims):
                share = share_of(self, step, piece, index)
                if isinstance(share, float) and not share:
                    continue
                given = piece if isinstance(share, float) else with_some_item(piece, share)
                total = total + run.passes_of(self).run(model, given, share, *arguments, **keywords)
        return total

    def plain_pass(
        self, model: Any, piece: Any, share: Any, *arguments: Any, **keywords: Any
    ) -> torch.Tensor:
        """Run the Trainer's own passes of a micro-batch, and return its loss times `share`."""
        run = self._fit_run
        with patch.object(run.step, "share", share), run.tree_of(self.model).use_cache("train"):
            loss: torch.Tensor = super().training_step(model, piece, *arguments, **keywords)
        return loss

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        """Return the loss, weighted by the micro-batch's fraction of labels in training, and unchanged in an
        evaluation.
        """
        if self.snugfit_run is None or self.snugfit_run.step.share is None:
            return super().compute_loss(model, inputs, *arguments, **keywords)
        step, share, plan = self.snugfit_run.step, self.snugfit_run.step.share, self.snugfit
        # from here on, the user's code may inspect the model
        self.snugfit_run.tree_of(self.model).withdraw()
        items = keywords.pop("num_items_in_batch", None)
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        users_own = has_user_loss(self)
        given = track_use(items) if users_own and items is not None else None
        is_alone = isinstance(share, float)
        if is_alone and not users_own and len(step.batches) > 1 and not plan.loss.corrected:
            plan.loss.corrected = plan.journal.warn_once(
                problem_of_model_loss(self, step, model, inputs, items)
            )
        with forward_context(plan.recipe.setup(), self.args.device, in_accelerate=True):
            loss = super().compute_loss(model, inputs, *arguments, num_items_in_batch=given, **keywords)
        used = bool(given.used) if given is not None and scaled is None else bool(scaled)
        if users_own and len(step.batches) > 1 and not used:
            plan.journal.warn_once(problem_of_users_loss(self, step, items))
        if used or (is_alone and share == 1):
            return loss
        return (loss[0] * share, *loss[1:]) if isinstance(loss, tuple) else loss * share

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the Trainer's own FLOP count of these inputs. The model's parameters are counted only
        once.
        """
        if self.snugfit_run is None:
            return int(super().floating_point_ops(inputs))
        with self.snugfit_run.tree_of(self.model).use_cache("num_parameters"):
            return int(super().floating_point_ops(inputs))

    def _clip_grad_norm(self, *arguments: Any, **keywords: Any) -> Any:
        with self._fit_run.tree_of(self.model).use_cache("parameters"):
            return super()._clip_grad_norm(*arguments, **keywords)

    def _get_grad_norm(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the norm of the gradients after clipping. A NaN or infinite loss or gradient ends the run.

        Meanwhile the host loads the next batch, until the device has computed the norm.
        """
        norm, run = super()._get_grad_norm(*arguments, **keywords), self._fit_run
        norm = tensor_parts().whole(norm)  # with sharded weights, each process has a part of the norm
        last = self.state.global_step + 1 >= self.state.max_steps
        if run.prefetcher and not last and not self.accelerator.gradient_state.end_of_dataloader:
            run.timer.record_launched()
            run.prefetcher.fetch()
        raise_if_non_finite(self, run, norm)
        return norm

    def _init_training_state(self, *arguments: Any, **keywords: Any) -> tuple[int, int]:
        """Return the finished epochs, and the batches of the next one to skip.

        transformers computes both from the number of steps, without the length of a stream's epochs.
        """
        counted: tuple[int, int] = super()._init_training_state(*arguments, **keywords)
        position = None if self.args.ignore_data_skip else self._fit_run.checkpoints.state.position
        return position or counted

    def _run_epoch(self, *arguments: Any, **keywords: Any) -> Any:
        import transformers.trainer

        epoch, begins_at = keywords["epoch"], keywords["epochs_trained"]
        skipped = keywords["steps_trained_in_current_epoch"] if epoch == begins_at else 0
        loader = self._begin_epoch(keywords.pop("train_dataloader"), epoch, skipped)
        # The loader already starts at the run's position, so accelerate must not skip batches.
        with patch.object(transformers.trainer, "skip_first_batches", _skip_nothing):
            return super()._run_epoch(*arguments, train_dataloader=loader, **keywords)

    def _begin_epoch(self, loader: Any, epoch: int, skipped: int) -> Any:
        """Return the loader for an epoch. In a resumed run, the epoch's order is drawn from the saved random
        states.

        A new run starts its checkpoints here, since its optimizer now exists.
        """
        run = self._fit_run
        run.checkpoints.begin(None)
        loader, saved = run.data.watch(loader), run.checkpoints.state.restore()
        if saved is not None:
            run.data.resume(saved)
            repeat_evaluation(self, run)
        loader = run.data.begin_epoch(loader, epoch, skipped, saved)
        if saved is not None and self._is_at_its_end():
            self._report_finished()
            self.control.should_training_stop = True
            run.data.resume(saved)  # no batch may be loaded again before the work at an epoch's end
            return ()
        return loader

    def _is_at_its_end(self) -> bool:
        """Return True if a resumed run has already finished all of its steps."""
        ends = self.control.should_training_stop or self._fit_run.checkpoints.state.ends
        return ends or self.state.global_step >= self.state.max_steps

    def _maybe_log_save_evaluate(self, *arguments: Any, **keywords: Any) -> None:
        """At the end of a step, log, save and evaluate. Then handle requests: save a checkpoint, stop, or use
        less memory.
        """
        loss, norm, *rest = arguments
        log_save_evaluate = super()._maybe_log_save_evaluate

        def go_on(figures: StepEnd) -> None:
            rates = {**keywords, "learning_rate": figures.learning_rate}
            log_save_evaluate(loss, figures.norm, *rest, **rates)

        end_step(self, self._fit_run, StepEnd(norm, keywords["learning_rate"]), go_on)

    def _evaluate(self, *arguments: Any, **keywords: Any) -> Any:
        return evaluate(self._fit_run, partial(super()._evaluate, *arguments, **keywords))

    def save_now(self) -> None:
        """Save a checkpoint now, outside of the Trainer's `save_steps`."""
        self._save_checkpoint(self.model_wrapped, None)
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def repeat_boundary(self, *, save: bool, ignored_keys: list[str] | None) -> None:
        """Run the evaluation that was skipped at the end of a step. With `save`, save a checkpoint after
        it.
        """
        self.control.should_log, self.control.should_evaluate, self.control.should_save = False, True, save
        super()._maybe_log_save_evaluate(
            self._tr_loss, None, self.model_wrapped, None, self.state.epoch, ignored_keys, time.time()
        )
        self.control.should_evaluate = self.control.should_save = False

    def _save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        """Save a checkpoint in snugfit's format, with the files of the user's Trainer subclass.

        If saving fails, the callbacks' `on_save` is not called.
        """
        self.store_flos()
        handler: dict[str, Any] = self.callback_handler.__dict__
        handler.pop("on_save", None)
        # An attribute of the instance replaces the class's method until the next save.
        if not self._fit_run.checkpoints.save(partial(super()._save_checkpoint, *arguments, **keywords)):
            handler["on_save"] = lambda args, state, control: control

    def snugfit_keep(self) -> None:
        """Write snugfit's checkpoint files. A user's overridden `_save_checkpoint` calls this as
        `super()._save_checkpoint()`.
        """
        self._fit_run.checkpoints.users_files.write_files()

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load all weights of a checkpoint. Raises an error if one is missing."""
        parts = trainer_parts(self)
        parts.drop_gathered()
        model = self.model if model is None else model
        parts.load_weights(model, Path(resume_from_checkpoint), self._fit_run.ranks)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the optimizer, the schedule and the scaler of a checkpoint."""
        self._fit_run.checkpoints.begin(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Do nothing, because the gradient scaler is loaded with the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._fit_run.checkpoints.state.restore_generators(Path(checkpoint))

    def _finalize_training(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the result of training, after all checkpoints are written and before the best model is
        loaded. A run stopped by a signal skips the rest.

        The mean loss covers all steps, including those before a resume.
        """
        run = self._fit_run
        if (saved := run.checkpoints.state.restore()) is not None:  # no epoch was left to train
            run.data.watch(self.callback_handler.train_dataloader)
            run.data.resume(saved)
            repeat_evaluation(self, run)
            self._report_finished()
        run.checkpoints.wait()
        average_losses_over_all_steps(self)
        if run.checkpoints.interrupts.stopping is None:
            # snugfit removes old checkpoints itself, so the Trainer must not.
            with patch.object(self.args, "save_total_limit", None):
                return super()._finalize_training(*arguments, **keywords)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        self.is_in_train = False
        return None

    def _report_finished(self) -> None:
        done = f"all {self.state.global_step:,} steps of this run are done. None is repeated."
        self.snugfit.journal.tell("note", text=f"Nothing is left to train: {done}")


@contextlib.contextmanager
def _name_memory_errors(trainer: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        cause = None if isinstance(error, SnugfitError) else memory_cause(error)
        if cause is None:
            raise
        raise update_broke(trainer, cause, error) from error


def _is_page_locked(args: Any) -> bool:
    """Return True if batches are in pinned memory, from which a GPU copies asynchronously.

    Otherwise the host waits for the copy, and so for the whole previous step.
    """
    return bool(args.device.type == "cuda" and args.dataloader_pin_memory)


def _skip_nothing(loader: Any, num_batches: int = 0) -> Any:
    """Return the loader of a Trainer's epoch unchanged, because `DataPosition` sets its position."""
    return loader
