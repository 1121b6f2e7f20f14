"""What we override and read of transformers and accelerate that is private to them, in one place.

None of it is promised by its authors, so all of it stands here, under plain names, and
`tests/test_transformers_internals.py` holds each name to the installed version: that it exists, takes what we
pass, and is called where we rely on it.

For a rehearsal both libraries stand on a device that is not there. They ask the machine which device it has
and refuse what it cannot do, so their placement is substituted and nothing else: while they set themselves up
the device is said to be CUDA, so that they decide as they would on a GPU; then their state's device
becomes `meta`, and everything they place goes there. Their own state of before, a user's live Accelerator
perhaps, is restored afterwards.

For a live trainer `TrainerHooks` gives the private moments of its training plain names, and the functions
below read and set its private fields.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import Trainer
else:
    Trainer = object  # the real one stands behind it, in the class that a front-end makes

_DEVICE = "ACCELERATE_TORCH_DEVICE"

# ---- a device that is not there --------------------------------------------------------------------------


@contextlib.contextmanager
def placed_on(device: torch.device) -> Iterator[None]:
    """Within it, accelerate sets itself up for `device`; afterwards its state is what it was."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    classes = (PartialState, AcceleratorState, GradientState)
    before = [dict(kind._shared_state) for kind in classes]
    environment = os.environ.get(_DEVICE)
    for kind in classes:
        kind._shared_state.clear()
    if device.type == "meta":
        os.environ[_DEVICE] = "cuda"
    elif device.type == "cpu":
        os.environ[_DEVICE] = "cpu"
    try:
        with _as_on_a_gpu() if device.type == "meta" else contextlib.nullcontext():
            yield
    finally:
        os.environ.pop(_DEVICE, None)
        if environment is not None:
            os.environ[_DEVICE] = environment
        for kind, state in zip(classes, before, strict=True):
            kind._shared_state.clear()
            kind._shared_state.update(state)


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Questions about this machine's GPU that stand in the way of setting up for another."""
    import accelerate.accelerator
    import transformers.training_args

    questions = (
        (transformers.training_args, "is_torch_bf16_gpu_available"),
        (accelerate.accelerator, "is_bf16_available"),
    )
    before = [getattr(module, name) for module, name in questions]
    for module, name in questions:
        setattr(module, name, lambda *arguments, **keywords: True)
    try:
        yield
    finally:
        for (module, name), value in zip(questions, before, strict=True):
            setattr(module, name, value)


def place_state(accelerator: Any, device: torch.device) -> None:
    """After set-up: for a rehearsal, everything from here on is placed on `meta`. On a real device nothing
    changes."""
    import torch
    from accelerate.state import AcceleratorState, PartialState

    if device.type != "meta":
        return
    for kind in (PartialState, AcceleratorState):  # the second copies the first whenever it is made
        kind._shared_state["device"] = device
    if accelerator.scaler is not None:
        accelerator.scaler = torch.amp.GradScaler("meta")


def arguments_class(device: torch.device) -> type[Any]:
    """`TrainingArguments`; for a rehearsal, with the device they set up substituted."""
    import transformers

    if device.type != "meta":
        plain: type[Any] = transformers.TrainingArguments
        return plain

    class PlacedArguments(transformers.TrainingArguments):  # type: ignore[misc]
        @property
        def _setup_devices(self) -> torch.device:
            from accelerate.state import PartialState

            self.distributed_state = PartialState()
            self._n_gpu = 1
            return device

    return PlacedArguments


# ---- moments of a live trainer ---------------------------------------------------------------------------


class TrainerHooks(Trainer):  # type: ignore[misc]
    """The private moments of `Trainer.train`, each as a method that a subclass overrides. Every one of them
    does what transformers does unless its docstring says that it stands in the place of that."""

    def snugfit_before_update(self, norm: Any) -> None:
        """The gradients of a step are there, clipped, with this norm; no weight has changed."""

    def snugfit_position(self, epochs: int, batches: int) -> tuple[int, int]:
        """Epochs that are done when training begins, and batches of the next one that are skipped."""
        return epochs, batches

    def snugfit_epoch_begins(self, loader: Any, epoch: int, skipped: int) -> Any:
        """An epoch begins; gives the loader to train over, which itself skips so many batches."""
        return loader

    def snugfit_border(self, learning_rate: float | None, go_on: Callable[[], None]) -> None:
        """A step ends; `go_on` logs, saves and evaluates as transformers does."""
        go_on()

    def snugfit_save(self, go_on: Callable[[], None]) -> None:
        """Keeps a checkpoint; `go_on` saves as the user's subclass does, which ends in `snugfit_keep`."""

    def snugfit_keep(self) -> None:
        """In the place of the Trainer's own saving, behind that of the user's subclass."""

    def snugfit_load_weights(self, model: Any, folder: Path) -> None:
        """Loads a checkpoint's weights, in the place of the Trainer's own loading."""

    def snugfit_load_optimizer(self, folder: Path | None) -> None:
        """Loads optimizer, schedule and scaler in the place of the Trainer's own loading; None where nothing
        is resumed."""

    def snugfit_load_generators(self, folder: Path) -> None:
        """Loads the random generators, in the place of the Trainer's own loading."""

    def snugfit_before_finish(self) -> None:
        """All steps are done; the best model may be read from a checkpoint now."""

    def _get_grad_norm(self, *arguments: Any, **keywords: Any) -> Any:
        norm = super()._get_grad_norm(*arguments, **keywords)
        self.snugfit_before_update(norm)
        return norm

    def _init_training_state(self, *arguments: Any, **keywords: Any) -> tuple[int, int]:
        return self.snugfit_position(*super()._init_training_state(*arguments, **keywords))

    def _run_epoch(self, *arguments: Any, **keywords: Any) -> Any:
        epoch, begins_at = keywords["epoch"], keywords["epochs_trained"]
        skipped = keywords["steps_trained_in_current_epoch"] if epoch == begins_at else 0
        loader = self.snugfit_epoch_begins(keywords.pop("train_dataloader"), epoch, skipped)
        with _skipping_nothing():
            return super()._run_epoch(*arguments, train_dataloader=loader, **keywords)

    def _maybe_log_save_evaluate(self, *arguments: Any, **keywords: Any) -> None:
        go_on = partial(super()._maybe_log_save_evaluate, *arguments, **keywords)
        self.snugfit_border(keywords.get("learning_rate"), go_on)

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
        """It comes with the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.snugfit_load_generators(Path(checkpoint))

    def _finalize_training(self, *arguments: Any, **keywords: Any) -> Any:
        self.snugfit_before_finish()
        return super()._finalize_training(*arguments, **keywords)


@contextlib.contextmanager
def _skipping_nothing() -> Iterator[None]:
    """Within it a Trainer's epoch takes its loader as it is, though batches of it were seen."""
    import transformers.trainer

    module: Any = transformers.trainer
    before = module.skip_first_batches
    module.skip_first_batches = lambda loader, num_batches=0: loader
    try:
        yield
    finally:
        module.skip_first_batches = before


def keeping_class(own: type[Any]) -> tuple[type[Any], ...]:
    """A trainer's class, and behind it one in which the saving of every subclass ends, before transformers'
    own."""
    import transformers

    class KeepingTrainer(transformers.Trainer):  # type: ignore[misc]
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            self.snugfit_keep()

    return (KeepingTrainer,) if own is transformers.Trainer else (own, KeepingTrainer)


def calls_on_save(trainer: Any) -> bool:
    """Whether a callback of the trainer waits for checkpoints."""
    from transformers import TrainerCallback

    return any(type(each).on_save is not TrainerCallback.on_save for each in trainer.callback_handler.callbacks)


def push_checkpoint(trainer: Any, folder: Path) -> None:
    """Begins to push a whole checkpoint to the hub, as the Trainer does when it has saved one."""
    trainer._push_from_checkpoint(str(folder))


# ---- fields of a live trainer ----------------------------------------------------------------------------

LOGGED = {"loss": "_tr_loss", "total_loss": "_total_loss_scalar", "last_logged": "_globalstep_last_logged"}
"""What a trainer remembers of its losses for its next log, by our names."""

ON_A_PREPARED_MODEL = ("forward", "_original_forward", "_is_accelerate_prepared")
"""What `Accelerator.prepare` leaves on a model."""


def logged_losses(trainer: Any) -> dict[str, Any]:
    """What the trainer's next log depends on, as JSON values."""
    values = {name: getattr(trainer, field) for name, field in LOGGED.items()}
    return {**values, "loss": values["loss"].item()}


def restore_logged_losses(trainer: Any, losses: Mapping[str, Any]) -> None:
    """Sets what `logged_losses` gave; to the losses since the last log they are added."""
    trainer._tr_loss += losses["loss"]
    trainer._total_loss_scalar = losses["total_loss"]
    trainer._globalstep_last_logged = losses["last_logged"]


def loss_since_log(trainer: Any) -> Any:
    """The sum of the losses since the last log, () on the device: the trainer's own tensor."""
    return trainer._tr_loss


def trainer_shifts_labels(trainer: Any) -> bool:
    """Whether the trainer counts labels as those of a model that shifts them by one."""
    return bool(trainer._loss_shifts_labels)


def weigh_losses_ourselves(trainer: Any) -> None:
    """Keeps the trainer from dividing each micro-batch's loss by their number."""
    trainer.current_gradient_accumulation_steps = 1


def has_users_schedule(trainer: Any) -> bool:
    """Whether the learning rate's schedule is one that the user brought."""
    return trainer.lr_scheduler is not None and not trainer._created_lr_scheduler


def replace_model(trainer: Any, model: Any) -> None:
    """Another model takes the place of the trainer's, where it is another."""
    if trainer.model is model:
        return
    trainer.model = trainer.model_wrapped = trainer.callback_handler.model = model
    trainer._signature_columns = None


def set_arguments(trainer: Any, changes: Mapping[str, Any]) -> None:
    """Sets `TrainingArguments` of a trainer that stands, with what it has made of them."""
    args = trainer.args
    if "bf16" in changes:
        _set_precision(trainer, "bf16" if changes["bf16"] else "fp16" if changes["fp16"] else "no")
    for name, value in changes.items():
        if name not in ("bf16", "fp16"):
            setattr(args, name, type(args.optim)(value) if name == "optim" else value)
    if "per_device_train_batch_size" in changes:
        trainer._train_batch_size = args.train_batch_size


def _set_precision(trainer: Any, mixed: str) -> None:
    """Its accelerator's, which autocasts and scales gradients. accelerate keeps one state for the process,
    which is made anew."""
    from accelerate.state import AcceleratorState

    args = trainer.args
    if trainer.accelerator.mixed_precision == mixed:
        return
    trainer.model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    trainer.model_wrapped = trainer.model
    args.bf16, args.fp16, args.mixed_precision = mixed == "bf16", mixed == "fp16", mixed
    AcceleratorState._reset_state()
    trainer.create_accelerator_and_postprocess()


def made_by_accelerate(optimizer: Any) -> bool:
    """Whether this optimizer is accelerate's shell, as it stands in a trainer that has trained."""
    return hasattr(optimizer, "accelerator_state")


@contextlib.contextmanager
def bare_model(model: Any) -> Iterator[None]:
    """Within it the model is as it was before `Accelerator.prepare` put its forward pass around it."""
    put = {name: model.__dict__.pop(name) for name in ON_A_PREPARED_MODEL if name in model.__dict__}
    if put and "_original_forward" not in put and "forward" in put:  # the user's own
        model.__dict__["forward"] = put["forward"]
    try:
        yield
    finally:
        model.__dict__.update(put)


@contextlib.contextmanager
def without_loader_record(trainer: Any) -> Iterator[None]:
    """A loader that is made within it has no workers, and accelerate does not remember it."""
    args, accelerator = trainer.args, trainer.accelerator
    changed = {
        "dataloader_num_workers": 0,
        "dataloader_prefetch_factor": None,
        "dataloader_persistent_workers": False,
    }
    before = {name: getattr(args, name) for name in changed}
    known = list(accelerator._dataloaders)
    vars(args).update(changed)
    try:
        yield
    finally:
        vars(args).update(before)
        accelerator._dataloaders[:] = known
