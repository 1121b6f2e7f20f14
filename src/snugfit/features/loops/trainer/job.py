"""The job (model, task and batch) of a user's trainer, with the first batch of its own loader.

Every random generator is restored, and the loader that yielded the batch is discarded.
"""

from __future__ import annotations

import contextlib
from typing import Any

from snugfit.errors import UsageError
from snugfit.features.loops.loader import count_of, example_of
from snugfit.features.loops.meta_copy import copy_without_data
from snugfit.features.loops.trainer.live_trainer import bare_model, loading_batches_of, without_loader_record
from snugfit.job.batch_layout import BatchDims
from snugfit.job.job import Job, Task
from snugfit.job.model import Model

SAMPLES = 16
"""Number of samples to choose from for the comparison of losses, if the global batch has as many."""


def job_of(trainer: Any, dims: BatchDims | None = None) -> Job:
    """Return this trainer's job; `dims` names the dimensions of the samples in its batches.

    Raises `UsageError` for a missing or empty dataset.
    """
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
    """Return one batch of several samples from the trainer's own loader, if its micro-batches have fewer.

    Return None if the job's first batch has enough samples, or the loader cannot yield such a batch.
    """
    if job.model.layout(job.batch_size).samples >= job.batch_size:
        return None
    with (
        contextlib.suppress(Exception),
        without_loader_record(trainer),
        loading_batches_of(trainer, min(job.batch_size, SAMPLES)),
    ):
        return example_of(trainer.get_train_dataloader, trainer.args.device, resumes=False)
    return None


def meta_copy(trainer: Any) -> Any:
    """Return a copy of the trainer's model on `meta`, as it was before any preparation for training.

    The copy has no changes by `fit`, and no wrapper of accelerate around the forward pass.
    """
    if (plan := getattr(trainer, "snugfit", None)) is not None:
        return plan.job.model.module
    with bare_model(trainer.model):
        return copy_without_data(trainer.model)


def _first_batch(trainer: Any) -> dict[str, Any]:
    """Return the first micro-batch of the trainer's own loader, on the CPU."""
    if trainer.train_dataset is None:
        raise UsageError(
            "The trainer has no train_dataset, so there is nothing to train on. Give one: "
            "Trainer(train_dataset=...)."
        )
    if count_of(trainer.train_dataset) == 0:
        raise UsageError("The trainer's train_dataset is empty. Training needs at least one sample.")
    with without_loader_record(trainer):
        return example_of(trainer.get_train_dataloader, trainer.args.device, resumes=True)
