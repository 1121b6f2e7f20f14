"""A live trainer as a job: its model, its batch, and an example from its own loader.

Looking changes nothing: every random generator is as it was, and the loader that was made for the example is
forgotten again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from snugfit.errors import UsageError
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.step.checkpointing import stop_own_checkpointing
from snugfit.training.generators import preserve_generators

_ACCELERATES = ("forward", "_original_forward", "_is_accelerate_prepared")
"""What `Accelerator.prepare` leaves on a model."""


def job_of(trainer: Any) -> Job:
    """What this trainer trains. Raises `UsageError` when there is nothing to look at."""
    args = trainer.args
    return Job(
        model=Model.from_module(likeness(trainer), example_of(trainer)),
        task=Task.CUSTOM,
        batch_size=args.per_device_train_batch_size * args.gradient_accumulation_steps,
        clip=float(args.max_grad_norm),
        decay_groups=True,
        learning_rate=float(args.learning_rate),
        build_on="host",
    )


def likeness(trainer: Any) -> Any:
    """The trainer's model without data, as it was before anything was done to train it: what a fit has made
    of it, and what accelerate puts around its forward pass when it has been trained, are left out."""
    import torch

    from snugfit.job.clone import clone_to_device

    if (plan := getattr(trainer, "snugfit", None)) is not None:
        return plan.job.model.module
    model = trainer.model
    put = {name: model.__dict__.pop(name) for name in _ACCELERATES if name in model.__dict__}
    if put and "_original_forward" not in put and "forward" in put:  # the user's own
        model.__dict__["forward"] = put["forward"]
    try:
        with torch.device("meta"):
            alike = clone_to_device(model)
    finally:
        model.__dict__.update(put)
    stop_own_checkpointing(alike)
    return alike


def example_of(trainer: Any) -> dict[str, Any]:
    """The first micro-batch that the trainer's own loader gives, on the host."""
    import torch

    if trainer.train_dataset is None:
        raise UsageError("The trainer has no train_dataset, so there is nothing to train on.")
    with preserve_generators(trainer.args.device), _no_trace(trainer):
        first = next(iter(trainer.get_train_dataloader()), None)
    if not isinstance(first, Mapping) or not first:
        raise UsageError(
            f"The trainer's batches are mappings of names to tensors, and its loader gave {first!r:.80}."
        )
    return {
        name: value.detach().cpu() if isinstance(value, torch.Tensor) else value
        for name, value in first.items()
    }


@contextlib.contextmanager
def _no_trace(trainer: Any) -> Iterator[None]:
    """A loader without workers, which accelerate does not remember."""
    args, accelerator = trainer.args, trainer.accelerator
    names = ("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_persistent_workers")
    before = {name: getattr(args, name) for name in names}
    known = list(accelerator._dataloaders)
    for name, value in zip(names, (0, None, False), strict=True):
        setattr(args, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(args, name, value)
        accelerator._dataloaders[:] = known
