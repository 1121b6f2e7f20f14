"""Access to private fields of a trainer and its accelerator (`step/transformers_internals.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

LOGGED = {"loss": "_tr_loss", "total_loss": "_total_loss_scalar", "last_logged": "_globalstep_last_logged"}
"""The Trainer's attributes for losses since its last log, by snugfit's names."""

PREPARED_ATTRIBUTES = ("forward", "_original_forward", "_is_accelerate_prepared")
"""Attributes that `Accelerator.prepare` sets on a model."""


def logged_losses(trainer: Any) -> dict[str, Any]:
    """Return the trainer's loss sums, and the step of its last log, as JSON values. Its next log depends on
    them.
    """
    values = {name: getattr(trainer, field) for name, field in LOGGED.items()}
    return {**values, "loss": values["loss"].item()}


def restore_logged_losses(trainer: Any, losses: Mapping[str, Any]) -> None:
    """Restore the values of `logged_losses`. The losses since the last log are added to the trainer's."""
    trainer._tr_loss += losses["loss"]
    trainer._total_loss_scalar = losses["total_loss"]
    trainer._globalstep_last_logged = losses["last_logged"]


def restore_callbacks(trainer: Any) -> None:
    """Restore the trainer's stateful callbacks from the states in its `TrainerState`."""
    trainer._load_callback_state()


def average_losses_over_all_steps(trainer: Any) -> None:
    """Scale the trainer's loss sum so that its mean is over all steps, including those before a resume. From
    5.19 on transformers divides by the steps of this call, before by all.
    """
    steps = trainer.state.global_step
    divisor = max(steps - getattr(trainer, "_initial_global_step", 0), 0.001)  # the formula of transformers
    mean = (trainer._total_loss_scalar + trainer._tr_loss.item()) / max(steps, 0.001)
    trainer._tr_loss.zero_()
    trainer._total_loss_scalar = mean * divisor


def loss_since_log(trainer: Any) -> Any:
    """Return the trainer's sum of the losses since the last log, a tensor () on the device."""
    return trainer._tr_loss


def trainer_shifts_labels(trainer: Any) -> bool:
    """Return True if the trainer counts labels shifted by one, as for a causal language model."""
    return bool(trainer._loss_shifts_labels)


def weigh_losses_ourselves(trainer: Any) -> None:
    """Stop the trainer from dividing the loss of each micro-batch by their number, because snugfit weights
    the losses.
    """
    trainer.current_gradient_accumulation_steps = 1


def has_users_schedule(trainer: Any) -> bool:
    """Return True if the user passed the trainer a learning-rate schedule."""
    return trainer.lr_scheduler is not None and not trainer._created_lr_scheduler


def replace_model(trainer: Any, model: Any) -> None:
    """Replace the trainer's model by `model`, unless it is the same object."""
    if trainer.model is model:
        return
    trainer.model = trainer.model_wrapped = trainer.callback_handler.model = model
    # These columns come from the signature of the old model's `forward`.
    trainer._signature_columns = None


def set_arguments(trainer: Any, changes: Mapping[str, Any]) -> None:
    """Change `TrainingArguments` of an existing trainer, and the values that the trainer derived from
    them.
    """
    args = trainer.args
    if "bf16" in changes:
        _set_precision(trainer, "bf16" if changes["bf16"] else "fp16" if changes["fp16"] else "no")
    for name, value in changes.items():
        if name not in ("bf16", "fp16"):
            # After `__post_init__`, `optim` is an enum member.
            setattr(args, name, type(args.optim)(value) if name == "optim" else value)
    if "per_device_train_batch_size" in changes:
        trainer._train_batch_size = args.train_batch_size


def _set_precision(trainer: Any, mixed: str) -> None:
    """Set the mixed precision of the trainer's accelerator, and create accelerate's process state again."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    args = trainer.args
    if trainer.accelerator.mixed_precision == mixed:
        return
    # `prepare` wrapped the forward pass in the autocast of the old precision.
    trainer.model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    trainer.model_wrapped = trainer.model
    args.bf16, args.fp16, args.mixed_precision = mixed == "bf16", mixed == "fp16", mixed
    AcceleratorState._reset_state()
    if PartialState._shared_state.get("distributed_type") == DistributedType.FSDP:  # it was MULTI_GPU before
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer.create_accelerator_and_postprocess()


def made_by_accelerate(optimizer: Any) -> bool:
    """Return True if this optimizer is accelerate's wrapper, as after training."""
    return hasattr(optimizer, "accelerator_state")


@contextlib.contextmanager
def bare_model(model: Any) -> Iterator[None]:
    """Context in which the model's forward pass is the original one, without the wrapper of
    `Accelerator.prepare`.
    """
    put = {name: model.__dict__.pop(name) for name in PREPARED_ATTRIBUTES if name in model.__dict__}
    if put and "_original_forward" not in put and "forward" in put:  # replaced by the user
        model.__dict__["forward"] = put["forward"]
    try:
        yield
    finally:
        model.__dict__.update(put)


@contextlib.contextmanager
def without_loader_record(trainer: Any) -> Iterator[None]:
    """Context in which the trainer's loaders have no workers, and accelerate keeps no reference to them."""
    args, accelerator = trainer.args, trainer.accelerator
    with (
        patch.multiple(
            args,
            dataloader_num_workers=0,
            dataloader_prefetch_factor=None,
            dataloader_persistent_workers=False,
        ),
        # The copy of the list records the new loaders, so that accelerate's own list does not change.
        patch.object(accelerator, "_dataloaders", list(accelerator._dataloaders)),
    ):
        yield


@contextlib.contextmanager
def loading_batches_of(trainer: Any, samples: int) -> Iterator[None]:
    """Context in which the trainer's loaders return batches of this many samples."""
    with patch.object(trainer, "_train_batch_size", samples):
        yield
