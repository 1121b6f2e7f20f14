"""Detection and calls of methods that a user's Trainer subclass or callbacks override.

This file, `transformers_internals.py` and the front-end's `trainer_class.py` contain all private names of a
Trainer that snugfit overrides, calls or reads. `tests/test_transformers_internals.py` checks them against the
installed version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple


class StepEnd(NamedTuple):
    """Gradient norm and learning rate of the last step before a log line. Each is None if this process has
    run no step.
    """

    norm: Any
    """Gradient norm of the step: a number, or a scalar tensor on the device."""

    learning_rate: float | None


def bases_that_keep(base: type[Any]) -> tuple[type, ...]:
    """Return base classes for a subclass of the user's trainer. The last one overrides `_save_checkpoint` of
    transformers' Trainer.
    """
    import transformers

    class KeepingTrainer(transformers.Trainer):  # type: ignore[misc]
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            self.snugfit_keep()

    return (KeepingTrainer,) if base is transformers.Trainer else (base, KeepingTrainer)


def overrides(trainer: Any, *names: str) -> bool:
    """Return True if the user's Trainer subclass, a mixin, or the instance itself defines one of these
    methods.
    """
    kinds = [k for k in type(trainer).__mro__ if not k.__module__.startswith(("transformers.", "snugfit."))]
    return any(name in vars(holder) for holder in (trainer, *kinds) for name in names)


def calls_on_save(trainer: Any) -> bool:
    """Return True if a callback of the trainer overrides `on_save`."""
    from transformers import TrainerCallback

    callbacks = trainer.callback_handler.callbacks
    return any(type(callback).on_save is not TrainerCallback.on_save for callback in callbacks)


def push_checkpoint(trainer: Any, folder: Path) -> None:
    """Start the upload of a complete checkpoint to the hub, as the Trainer does after saving."""
    trainer._push_from_checkpoint(str(folder))
