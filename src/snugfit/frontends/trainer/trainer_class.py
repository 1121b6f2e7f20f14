"""The class between a trainer and its own class: it reads settings that `TrainingArguments` lack.

`fitted_class(type(trainer))` is a class of the same name. Its methods come first, then the user's subclass's,
then transformers'. Each does a little and calls the next one. `TrainerHooks` gives plain names to
transformers' private methods.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from snugfit.errors import SnugfitError
from snugfit.frontends.items import pieces_of
from snugfit.frontends.loader import renew_workers
from snugfit.frontends.trainer.boundary import (
    begin_step,
    compare_again,
    end_step,
    evaluate,
    raise_if_non_finite,
    repeat_evaluation,
)
from snugfit.frontends.trainer.fit_run import FitPlan, FitRun, open_run
from snugfit.frontends.trainer.loss import (
    is_users_own,
    problem_of_model_loss,
    problem_of_users_loss,
    share_of,
    track_use,
    weigh_among_all,
)
from snugfit.frontends.trainer.out_of_memory import retry_step, update_broke
from snugfit.frontends.trainer.parts import trainer_parts
from snugfit.frontends.trainer.ranks import with_some_item
from snugfit.frontends.trainer.setup import brings_optimizer, optimizer_for
from snugfit.step.applier import forward_context, run_context, set_process
from snugfit.step.memory_errors import memory_cause
from snugfit.step.trainer_hooks import StepEnd, TrainerHooks, keeping_bases
from snugfit.step.transformers_internals import average_losses_over_all_steps, weigh_losses_ourselves
from snugfit.techniques.technique import Slot
from snugfit.training.interrupt import EXIT_CODES, EvaluationStopped
from snugfit.training.run.loader import Prefetcher
from snugfit.training.run.trained import FINISHED, STOPPED


def fitted_class(own: type[Any]) -> type[Any]:
    """Return a subclass of a trainer's class that trains under its fitted plan."""
    bases = (FittedTrainer, *keeping_bases(own))
    return type(own.__name__, bases, {"__module__": __name__, "__doc__": own.__doc__})


class FittedTrainer(TrainerHooks):
    """Methods that `fit` inserts before those of a trainer's own class."""

    snugfit: FitPlan
    """The fitted plan; another one replaces it when memory runs out."""

    snugfit_run: FitRun | None
    """The running `train()`; None outside."""

    optimizer: Any

    @property
    def _fit_run(self) -> FitRun:
        assert self.snugfit_run is not None, "outside of train()"
        return self.snugfit_run

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **keywords: Any
    ) -> Any:
        """Run the trainer's own `train()` under the recipe, in a folder locked for this run."""
        setup = self.snugfit.recipe.setup()
        set_process(setup, self.args.device)
        with (
            run_context(setup, self.snugfit.user_slots),
            patch.multiple(
                self.args, logging_nan_inf_filter=False, restore_callback_states_from_checkpoint=True
            ),
            patch.object(self.accelerator.dataloader_config, "non_blocking", _is_page_locked(self.args)),
            open_run(self, resume_from_checkpoint) as run,
        ):
            if run.checkpoints.finished is not None:
                return run.checkpoints.finished
            run.ignored_keys = keywords.get("ignore_keys_for_eval", (*arguments, None, None)[1])
            resumed, done = run.checkpoints.resumed, None
            with _name_memory_errors(self), run.checkpoints.state.train_begin_freezes_nothing():
                with contextlib.suppress(EvaluationStopped):  # before the first step
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
        """Return the trainer's own loader, with new workers."""
        loader = super().get_eval_dataloader(*arguments, **keywords)
        renew_workers(loader)
        return loader

    def get_batch_samples(self, epoch_iterator: Any, *arguments: Any, **keywords: Any) -> Any:
        """Return the micro-batches of one step."""
        run, get_batch_samples = self._fit_run, super().get_batch_samples

        def fetch() -> Any:
            with run.timer.fetching(), run.data.rng.drawing():
                return get_batch_samples(epoch_iterator, *arguments, **keywords)

        run.timer.begin()
        if run.prefetcher is None or run.epoch_iterator is not epoch_iterator:
            run.prefetcher, run.epoch_iterator = Prefetcher(fetch), epoch_iterator
        run.prefetcher.make = fetch
        samples, items = run.prefetcher.take()
        run.timer.count(samples, self.snugfit.job.model.batch_dims)
        run.data.use(len(samples))
        run.step = run.step.following(samples)
        return samples, items

    def training_step(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        """Train one micro-batch, weighted by its share.

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
            if exhausted is None:
                break
            retry_step(self, run, str(exhausted[0]), exhausted[1])
            step.loss_sum, todo = None, step.batches[: step.micro_batch_index]
        before, step.loss_sum = step.loss_sum, losses if step.loss_sum is None else step.loss_sum + losses
        return losses if before is not None or given is None else losses - given

    def _losses(self, model: Any, batches: list[Any], *arguments: Any, **keywords: Any) -> Any:
        """Add the gradients of these micro-batches, each in its pieces; return their weighted losses.

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
                with patch.object(step, "share", share), run.tree_of(self.model).answering("train"):
                    total = total + super().training_step(model, given, *arguments, **keywords)
        return total

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        """Compute the loss, weighted by its share in training, unchanged in an evaluation."""
        if self.snugfit_run is None or self.snugfit_run.step.share is None:
            return super().compute_loss(model, inputs, *arguments, **keywords)
        step, share, plan = self.snugfit_run.step, self.snugfit_run.step.share, self.snugfit
        # from here on the user's code inspects the model
        self.snugfit_run.tree_of(self.model).withdraw()
        items = keywords.pop("num_items_in_batch", None)
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        users_own = is_users_own(self)
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
        """Return the trainer's own count, with the parameters counted once."""
        if self.snugfit_run is None:
            return int(super().floating_point_ops(inputs))
        with self.snugfit_run.tree_of(self.model).answering("num_parameters"):
            return int(super().floating_point_ops(inputs))

    def snugfit_clip(self, go_on: Callable[[], Any]) -> Any:
        """Clip the gradients, with the parameters listed once."""
        with self._fit_run.tree_of(self.model).answering("parameters"):
            return go_on()

    def snugfit_before_update(self, norm: Any) -> None:
        """Stop the run at a NaN or infinite loss or gradient.

        The host creates the next batch until the device has computed them.
        """
        run = self._fit_run
        last = self.state.global_step + 1 >= self.state.max_steps
        if run.prefetcher and not last and not self.accelerator.gradient_state.end_of_dataloader:
            run.timer.record_launched()
            run.prefetcher.fetch()
        raise_if_non_finite(self, run, norm)

    def snugfit_position(self, epochs: int, batches: int) -> tuple[int, int]:
        """Return the position of the checkpoint.

        transformers has only the number of steps, and not the length of a stream's epochs.
        """
        position = None if self.args.ignore_data_skip else self._fit_run.checkpoints.state.position
        return position or (epochs, batches)

    def snugfit_epoch_begins(self, loader: Any, epoch: int, skipped: int) -> Any:
        """Start an epoch; a resumed one draws its order from its saved generators.

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
            self._say_nothing_is_left()
            self.control.should_training_stop = True
            run.data.resume(saved)  # no batch is created again before the work of an epoch's end
            return ()
        return loader

    def _is_at_its_end(self) -> bool:
        """Return True if a resumed run has no step left."""
        ends = self.control.should_training_stop or self._fit_run.checkpoints.state.ends
        return ends or self.state.global_step >= self.state.max_steps

    def snugfit_border(self, figures: StepEnd, go_on: Callable[[StepEnd], None]) -> None:
        """Handle requests made during the step: a checkpoint, a stop, less memory."""
        end_step(self, self._fit_run, figures, go_on)

    def snugfit_evaluate(self, go_on: Callable[[], Any]) -> Any:
        """Evaluate until a signal arrives."""
        return evaluate(self._fit_run, go_on)

    def snugfit_save(self, go_on: Callable[[], None]) -> None:
        """Save by the run's own checkpoints, with the files of the user's subclass.

        After a failure, no callback is notified of a checkpoint.
        """
        handler: dict[str, Any] = self.callback_handler.__dict__
        handler.pop("on_save", None)
        if not self._fit_run.checkpoints.save(go_on):
            handler["on_save"] = lambda args, state, control: control

    def snugfit_keep(self) -> None:
        """Write the run's own files at the end of the user's saving methods."""
        self._fit_run.checkpoints.users_files.write_own()

    def snugfit_load_weights(self, model: Any, folder: Path) -> None:
        """Load every weight, or raise an error."""
        parts = trainer_parts(self)
        parts.drop_gathered()
        parts.load_weights(model, folder, self._fit_run.ranks)

    def snugfit_load_optimizer(self, folder: Path | None) -> None:
        """Load the optimizer, the schedule and the scaler."""
        self._fit_run.checkpoints.begin(None if folder is None else str(folder))

    def snugfit_load_generators(self, folder: Path) -> None:
        """Restore the generators of the model."""
        self._fit_run.checkpoints.state.restore_generators(folder)

    def snugfit_before_finish(self) -> bool:
        """Wait for checkpoints before the best model is read; return False for a run stopped by a signal.

        The mean loss covers all steps, including those before a resume.
        """
        run = self._fit_run
        if (saved := run.checkpoints.state.restore()) is not None:  # no epoch was left
            run.data.watch(self.callback_handler.train_dataloader)
            run.data.resume(saved)
            repeat_evaluation(self, run)
            self._say_nothing_is_left()
        run.checkpoints.wait()
        average_losses_over_all_steps(self)
        return run.checkpoints.interrupts.stopping is None

    def _say_nothing_is_left(self) -> None:
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
    """Return True for batches in page-locked memory, from which a GPU copies asynchronously.

    The host does not wait for that copy, which would mean waiting for the whole previous step.
    """
    return bool(args.device.type == "cuda" and args.dataloader_pin_memory)
