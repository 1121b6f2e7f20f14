"""The private methods of `transformers.Trainer`'s training and saving, under plain names.

This file and `transformers_internals.py` hold every private name of transformers that snugfit overrides,
calls or reads. `tests/test_transformers_internals.py` checks them against the installed version.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object  # the front-end's class adds the real one as a base


class StepEnd(NamedTuple):
    """Figures of the step before a log line; None where this process has taken no step."""

    norm: Any
    """A number, or a tensor () on the device."""

    learning_rate: float | None


class TrainerHooks(Trainer):  # type: ignore[misc]
    """The private methods of `Trainer.train`, each under a name that a subclass overrides. Each does the same
    as transformers unless its docstring names a replacement.
    """

    control: Any
    """State of the Trainer's control flow."""

    model: Any
    optimizer: Any

    def snugfit_clip(self, go_on: Callable[[], Any]) -> Any:
        """Clip a step's gradients; `go_on` clips them as transformers does and returns their norm."""
        return go_on()

    def snugfit_before_update(self, norm: Any) -> None:
        """Run before the update; the gradients are clipped, and `norm` is theirs."""

    def snugfit_position(self, epochs: int, batches: int) -> tuple[int, int]:
        """Return the finished epochs at the start of training, and the batches of the next one to skip."""
        return epochs, batches

    def snugfit_epoch_begins(self, loader: Any, epoch: int, skipped: int) -> Any:
        """Begin an epoch; return the loader to train over, which itself skips `skipped` batches."""
        return loader

    def snugfit_border(self, figures: StepEnd, go_on: Callable[[StepEnd], None]) -> None:
        """Handle the end of a step or an epoch; `figures` belong to the step. `go_on` takes them, and logs,
        saves and evaluates as transformers does.
        """
        go_on(figures)

    def snugfit_evaluate(self, go_on: Callable[[], Any]) -> Any:
        """Evaluate at the end of a step, or before the first one; `go_on` evaluates as transformers does."""
        return go_on()

    def snugfit_save(self, go_on: Callable[[], None]) -> None:
        """Save a checkpoint; `go_on` saves as the user's subclass does, which ends in `snugfit_keep`."""

    def snugfit_keep(self) -> None:
        """Save in place of the Trainer's own saving, after that of the user's subclass."""

    def snugfit_load_weights(self, model: Any, folder: Path) -> None:
        """Load a checkpoint's weights, in place of the Trainer's own loading."""

    def snugfit_load_optimizer(self, folder: Path | None) -> None:
        """Load optimizer, schedule and scaler in place of the Trainer's own loading; `folder` is None without
        a resume.
        """

    def snugfit_load_generators(self, folder: Path) -> None:
        """Load the random generators, in place of the Trainer's own loading."""

    def snugfit_before_finish(self) -> bool:
        """Run after all steps, when the best model may be read from a checkpoint. Return False for a stopped
        run, which skips the rest.
        """
        return True

    def _clip_grad_norm(self, *arguments: Any, **keywords: Any) -> Any:
        return self.snugfit_clip(partial(super()._clip_grad_norm, *arguments, **keywords))

    def _get_grad_norm(self, *arguments: Any, **keywords: Any) -> Any:
        norm = super()._get_grad_norm(*arguments, **keywords)
        if hasattr(norm, "full_tensor"):  # of weights in parts: each process has its part of it
            norm = norm.full_tensor()
        self.snugfit_before_update(norm)
        return norm

    def _init_training_state(self, *arguments: Any, **keywords: Any) -> tuple[int, int]:
        return self.snugfit_position(*super()._init_training_state(*arguments, **keywords))

    def _run_epoch(self, *arguments: Any, **keywords: Any) -> Any:
        import transformers.trainer

        epoch, begins_at = keywords["epoch"], keywords["epochs_trained"]
        skipped = keywords["steps_trained_in_current_epoch"] if epoch == begins_at else 0
        loader = self.snugfit_epoch_begins(keywords.pop("train_dataloader"), epoch, skipped)
        with patch.object(transformers.trainer, "skip_first_batches", _skip_nothing):
            return super()._run_epoch(*arguments, train_dataloader=loader, **keywords)

    def _maybe_log_save_evaluate(self, *arguments: Any, **keywords: Any) -> None:
        loss, norm, *rest = arguments
        end_step = super()._maybe_log_save_evaluate

        def go_on(figures: StepEnd) -> None:
            end_step(loss, figures.norm, *rest, **{**keywords, "learning_rate": figures.learning_rate})

        self.snugfit_border(StepEnd(norm, keywords["learning_rate"]), go_on)

    def _evaluate(self, *arguments: Any, **keywords: Any) -> Any:
        return self.snugfit_evaluate(partial(super()._evaluate, *arguments, **keywords))

    def save_now(self) -> None:
        """Save a checkpoint outside of the Trainer's own schedule."""
        self._save_checkpoint(self.model_wrapped, None)
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def repeat_boundary(self, *, save: bool, ignored_keys: list[str] | None) -> None:
        """Run the evaluation that the end of a step left out, and with `save` the checkpoint after it."""
        self.control.should_log, self.control.should_evaluate, self.control.should_save = False, True, save
        super()._maybe_log_save_evaluate(
            self._tr_loss, None, self.model_wrapped, None, self.state.epoch, ignored_keys, time.time()
        )
        self.control.should_evaluate = self.control.should_save = False

    def _save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        self.store_flos()
        self.snugfit_save(partial(super()._save_checkpoint, *arguments, **keywords))

    def _load_best_model(self) -> None:
        self.snugfit_load_weights(self.model, Path(self.state.best_model_checkpoint))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.snugfit_load_weights(self.model if model is None else model, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self.snugfit_load_optimizer(None if checkpoint is None else Path(checkpoint))

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load nothing: the scaler comes with the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.snugfit_load_generators(Path(checkpoint))

    def _finalize_training(self, *arguments: Any, **keywords: Any) -> Any:
        if self.snugfit_before_finish():
            # snugfit removes old checkpoints itself, so the Trainer must not.
            with patch.object(self.args, "save_total_limit", None):
                return super()._finalize_training(*arguments, **keywords)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        self.is_in_train = False
        return None


def _skip_nothing(loader: Any, num_batches: int = 0) -> Any:
    """Return the loader of a Trainer's epoch unchanged, though batches of it were used."""
    return loader


def keeping_bases(own: type[Any]) -> tuple[type, ...]:
    """Return a trainer's class, followed by one that ends the saving of every subclass before transformers'
    own.
    """
    import transformers

    class KeepingTrainer(transformers.Trainer):  # type: ignore[misc]
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            self.snugfit_keep()

    return (KeepingTrainer,) if own is transformers.Trainer else (own, KeepingTrainer)


def overrides(trainer: Any, *names: str) -> bool:
    """Return whether the user's subclass, one of its mixins, or the instance itself defines one of these
    methods.
    """
    kinds = [k for k in type(trainer).__mro__ if not k.__module__.startswith(("transformers.", "snugfit."))]
    return any(name in vars(holder) for holder in (trainer, *kinds) for name in names)


def calls_on_save(trainer: Any) -> bool:
    """Return whether a callback of the trainer overrides `on_save`."""
    from transformers import TrainerCallback

    callbacks = trainer.callback_handler.callbacks
    return any(type(callback).on_save is not TrainerCallback.on_save for callback in callbacks)


def push_checkpoint(trainer: Any, folder: Path) -> None:
    """Begin to push a whole checkpoint to the hub, as the Trainer does after saving one."""
    trainer._push_from_checkpoint(str(folder))
