"""The private names of transformers and accelerate that snugfit overrides and reads.

Their authors promise none of them. So all are in this file, in `trainer_hooks.py` and in the class of a
fitted trainer (`frontends/trainer/trainer_class.py`). `tests/test_transformers_internals.py` checks each
against the installed version: it exists, takes our arguments, and is called where we rely on it.

In a rehearsal both libraries run for a device that does not exist. They query the machine's device and refuse
unsupported settings, so their placement is substituted and no other part. During set-up the device is
reported as CUDA, so that they decide as on a GPU. Then their state's device becomes `meta`, and they place
everything there. Afterwards their earlier state, perhaps a user's live Accelerator, is restored.

The functions for a live trainer read and set its private fields.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    import torch


DEVICE = "ACCELERATE_TORCH_DEVICE"
"""Name of the environment variable that sets accelerate's device."""


# ---- a device that is not there --------------------------------------------------------------------------


@contextlib.contextmanager
def placed_on(device: torch.device) -> Iterator[None]:
    """Set up accelerate's global state for `device`, and restore it afterwards."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    variables = {"meta": {DEVICE: "cuda"}, "cpu": {DEVICE: "cpu"}}
    with contextlib.ExitStack() as changes:
        # All instances of such a class share one dictionary, so an empty one means a new set-up.
        for kind in (PartialState, AcceleratorState, GradientState):
            changes.enter_context(patch.dict(kind._shared_state, clear=True))
        changes.enter_context(patch.dict(os.environ, variables.get(device.type, {})))
        if device.type == "meta":
            changes.enter_context(_as_on_a_gpu())
        yield


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Patch the checks in transformers and accelerate that would refuse a GPU's settings on this machine."""
    import accelerate.accelerator
    import transformers.training_args

    with (
        patch.object(transformers.training_args, "is_torch_bf16_gpu_available", _always),
        patch.object(accelerate.accelerator, "is_bf16_available", _always),
    ):
        yield


def _always(*arguments: Any, **keywords: Any) -> bool:
    return True


def place_state(accelerator: Any, device: torch.device) -> None:
    """Set an accelerator's device to `meta` after its set-up, for a simulation. On a real device nothing
    changes."""
    import torch
    from accelerate.state import AcceleratorState, PartialState

    if device.type != "meta":
        return
    for kind in (PartialState, AcceleratorState):  # the second copies the first whenever it is made
        kind._shared_state["device"] = device
    if accelerator.scaler is not None:
        # The scaler was made for CUDA, the device during set-up.
        accelerator.scaler = torch.amp.GradScaler("meta")


def arguments_class(device: torch.device) -> type[Any]:
    """Return `TrainingArguments`, or for a simulation a subclass whose device is `meta`."""
    import transformers

    if device.type != "meta":
        plain: type[Any] = transformers.TrainingArguments
        return plain

    class PlacedArguments(transformers.TrainingArguments):  # type: ignore[misc]
        @property
        def _setup_devices(self) -> torch.device:
            from accelerate.state import PartialState

            self.distributed_state = PartialState()
            # With several GPUs on this machine, the Trainer would use `DataParallel`.
            self._n_gpu = 1
            return device

    return PlacedArguments


# ---- fields of a live trainer ----------------------------------------------------------------------------

LOGGED = {"loss": "_tr_loss", "total_loss": "_total_loss_scalar", "last_logged": "_globalstep_last_logged"}
"""Private fields of a trainer with the losses since its last log, by the names under which snugfit stores
them."""

ON_A_PREPARED_MODEL = ("forward", "_original_forward", "_is_accelerate_prepared")
"""Attributes that `Accelerator.prepare` leaves on a model."""


def logged_losses(trainer: Any) -> dict[str, Any]:
    """Return the losses and step of the trainer's last log, on which its next log depends, as JSON values."""
    values = {name: getattr(trainer, field) for name, field in LOGGED.items()}
    return {**values, "loss": values["loss"].item()}


def restore_logged_losses(trainer: Any, losses: Mapping[str, Any]) -> None:
    """Restore the values of `logged_losses`; the loss since the last log is added to the trainer's own."""
    trainer._tr_loss += losses["loss"]
    trainer._total_loss_scalar = losses["total_loss"]
    trainer._globalstep_last_logged = losses["last_logged"]


def restore_callbacks(trainer: Any) -> None:
    """Restore the states of the trainer's callbacks from its `TrainerState`."""
    trainer._load_callback_state()


def average_losses_over_all_steps(trainer: Any) -> None:
    """Scale the trainer's loss sum before it takes a run's mean. The sum is over all steps, those before a
    resume included. From 5.19 on transformers divides by the steps of this call, before by all.
    """
    steps = trainer.state.global_step
    divisor = max(steps - getattr(trainer, "_initial_global_step", 0), 0.001)  # as transformers has it
    mean = (trainer._total_loss_scalar + trainer._tr_loss.item()) / max(steps, 0.001)
    trainer._tr_loss.zero_()
    trainer._total_loss_scalar = mean * divisor


def loss_since_log(trainer: Any) -> Any:
    """Return the sum of the losses since the last log, () on the device: the trainer's own tensor."""
    return trainer._tr_loss


def trainer_shifts_labels(trainer: Any) -> bool:
    """Return whether the trainer counts labels of a model that shifts them by one."""
    return bool(trainer._loss_shifts_labels)


def weigh_losses_ourselves(trainer: Any) -> None:
    """Stop the trainer from dividing each micro-batch's loss by the number of micro-batches, since snugfit
    weights losses."""
    trainer.current_gradient_accumulation_steps = 1


def has_users_schedule(trainer: Any) -> bool:
    """Return whether the learning-rate schedule is the user's own."""
    return trainer.lr_scheduler is not None and not trainer._created_lr_scheduler


def replace_model(trainer: Any, model: Any) -> None:
    """Replace the trainer's model and the references that its callbacks hold to it."""
    if trainer.model is model:
        return
    trainer.model = trainer.model_wrapped = trainer.callback_handler.model = model
    # These columns are from the signature of the old model's forward pass.
    trainer._signature_columns = None


def set_arguments(trainer: Any, changes: Mapping[str, Any]) -> None:
    """Set `TrainingArguments` of a built trainer, and the values that it has derived from them."""
    args = trainer.args
    if "bf16" in changes:
        _set_precision(trainer, "bf16" if changes["bf16"] else "fp16" if changes["fp16"] else "no")
    for name, value in changes.items():
        if name not in ("bf16", "fp16"):
            # After `__post_init__`, `optim` is a member of an enumeration.
            setattr(args, name, type(args.optim)(value) if name == "optim" else value)
    if "per_device_train_batch_size" in changes:
        trainer._train_batch_size = args.train_batch_size


def _set_precision(trainer: Any, mixed: str) -> None:
    """Set the mixed precision of a trainer's accelerator, which autocasts and scales gradients. accelerate
    keeps one state for the process, which is made again."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    args = trainer.args
    if trainer.accelerator.mixed_precision == mixed:
        return
    # `prepare` wrapped the forward pass in the autocast of the old precision.
    trainer.model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    trainer.model_wrapped = trainer.model
    args.bf16, args.fp16, args.mixed_precision = mixed == "bf16", mixed == "fp16", mixed
    AcceleratorState._reset_state()
    if PartialState._shared_state.get("distributed_type") == DistributedType.FSDP:  # it made that of GPUs
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer.create_accelerator_and_postprocess()


def made_by_accelerate(optimizer: Any) -> bool:
    """Return whether this optimizer is accelerate's wrapper, as in a trainer that has trained."""
    return hasattr(optimizer, "accelerator_state")


@contextlib.contextmanager
def bare_model(model: Any) -> Iterator[None]:
    """Context that restores a model's original forward method, from before `Accelerator.prepare` wrapped
    it."""
    put = {name: model.__dict__.pop(name) for name in ON_A_PREPARED_MODEL if name in model.__dict__}
    if put and "_original_forward" not in put and "forward" in put:  # the user's own
        model.__dict__["forward"] = put["forward"]
    try:
        yield
    finally:
        model.__dict__.update(put)


@contextlib.contextmanager
def without_loader_record(trainer: Any) -> Iterator[None]:
    """Context in which the trainer's loaders have no workers and accelerate does not record them."""
    args, accelerator = trainer.args, trainer.accelerator
    with (
        patch.multiple(
            args,
            dataloader_num_workers=0,
            dataloader_prefetch_factor=None,
            dataloader_persistent_workers=False,
        ),
        # The copy receives the new loaders, so accelerate's own list stays as it was.
        patch.object(accelerator, "_dataloaders", list(accelerator._dataloaders)),
    ):
        yield


@contextlib.contextmanager
def loading_batches_of(trainer: Any, samples: int) -> Iterator[None]:
    """Context in which the trainer's loaders return batches of this many samples."""
    with patch.object(trainer, "_train_batch_size", samples):
        yield
