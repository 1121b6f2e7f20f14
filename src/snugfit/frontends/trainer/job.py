"""A live trainer as a job: its model, its batch, and an example from its own loader.

Looking changes nothing: every random generator is as it was, and the loader that was made for the example is
forgotten again.
"""

from __future__ import annotations

import contextlib
from typing import Any

from snugfit.errors import UsageError
from snugfit.frontends.items import example_of, samples_in
from snugfit.frontends.loader import count_of
from snugfit.job.batch_layout import BatchDims
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.step.checkpointing import copy_without_data
from snugfit.step.transformers_internals import bare_model, loading_batches_of, without_loader_record

SAMPLES = 16
"""Samples among which those are chosen that are compared, where the global batch has so many."""


def job_of(trainer: Any, dims: BatchDims | None = None) -> Job:
    """What this trainer trains; `dims` names where the samples of its batches lie. Raises `UsageError` when
    there is nothing to look at."""
    args = trainer.args
    module, example = meta_copy(trainer), _first_batch(trainer)
    return Job(
        model=Model.from_module(module, example, batch_dims=dims),
        task=Task.CUSTOM,
        batch_size=args.per_device_train_batch_size * args.gradient_accumulation_steps,
        clip=float(args.max_grad_norm),
        decay_groups=True,
        learning_rate=float(args.learning_rate),
        build_on="host",
    )


def several_samples(trainer: Any, job: Job) -> dict[str, Any] | None:
    """Read one batch of several samples by the trainer's own loader, where its micro-batches have fewer.
    Return None where the example has all, and for a loader that cannot make one."""
    if samples_in(job.model.example or {}, job.model.batch_dims) >= job.batch_size:
        return None
    with (
        contextlib.suppress(Exception),
        without_loader_record(trainer),
        loading_batches_of(trainer, min(job.batch_size, SAMPLES)),
    ):
        return example_of(trainer.get_train_dataloader, trainer.args.device, resumes=False)
    return None


def meta_copy(trainer: Any) -> Any:
    """The trainer's model without data, as it was before anything was done to train it: what a fit has made
    of it, and what accelerate puts around its forward pass when it has been trained, are left out."""
    if (plan := getattr(trainer, "snugfit", None)) is not None:
        return plan.job.model.module
    with bare_model(trainer.model):
        return copy_without_data(trainer.model)


def _first_batch(trainer: Any) -> dict[str, Any]:
    """The first micro-batch that the trainer's own loader gives, on the host."""
    if trainer.train_dataset is None:
        raise UsageError("The trainer has no train_dataset, so there is nothing to train on.")
    if count_of(trainer.train_dataset) == 0:
        raise UsageError("The trainer's train_dataset is empty. Training needs at least one sample.")
    with without_loader_record(trainer):
        return example_of(trainer.get_train_dataloader, trainer.args.device, resumes=True)
