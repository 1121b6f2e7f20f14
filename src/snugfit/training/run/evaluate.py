"""Evaluation: the loss and, for tasks with right answers, the share of them.

The state of the training is unchanged: no gradients, no dropout, no random numbers, and the model keeps its
mode. The loss is the mean over all counted items of the data, independent of the batches.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snugfit.job.batch import IGNORED, label_items
from snugfit.job.inputs import has_classes, inputs_of
from snugfit.step.applier import loader_arguments
from snugfit.step.batches import place
from snugfit.step.loss import loss_of
from snugfit.training.ranks import ALONE, Ranks
from snugfit.training.run.loader import collate_for, feed
from snugfit.training.run.order import SampleOrder

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup
    from snugfit.training.run.run import Data


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Loss and accuracy of a model on the evaluation data."""

    loss: float
    """Mean loss over all samples, or over all tokens that have a label."""

    accuracy: float | None
    """Share of correct answers, from 0 to 1: classes of samples, tokens or pixels, exact spans, and ordered
    pairs. None for a task without them."""

    def metric(self, name: str) -> float:
        """Return the loss or the accuracy by its name; NaN if the evaluation has no accuracy."""
        value = self.loss if name == "loss" else self.accuracy
        return math.nan if value is None else value


def evaluate(
    model: torch.nn.Module | Any,
    job: Job,
    batches: Iterable[tuple[dict[str, Any], bool]],
    device: torch.device,
    autocast: contextlib.AbstractContextManager[Any],
    raise_if_stopping: Callable[[], None] = lambda: None,
    ranks: Ranks = ALONE,
    within: Callable[[dict[str, Any]], contextlib.AbstractContextManager[Any]] = lambda batch: (
        contextlib.nullcontext()
    ),
) -> EvaluationResult:
    """Return the model's loss and accuracy over host batches, each with True if it counts.

    Several processes sum over the batches of all. `raise_if_stopping` is called before each batch and may
    abandon the evaluation. Each call of the model runs in the context `within(batch)`, which may reduce the
    batch to this process's part.
    """
    import torch

    before = model.training
    model.eval()
    inputs = inputs_of(job.task, job.model.architecture)
    counts, lost, items, right, answers = has_classes(job.task) and job.labels > 1, 0.0, 0, 0, 0
    try:
        for host, is_counted in batches:
            raise_if_stopping()
            share = label_items(job, host) if is_counted else 0
            if not share and not ranks.are_many:  # the other processes wait for this one's results
                continue
            batch = place(host, device)
            with torch.no_grad(), autocast, within(batch):
                out: Any = model(**batch)
            if not share:
                continue
            lost += float(loss_of(out)) * share
            items += share
            correct = inputs.correct(out, batch)
            # Segmentation has its classes in another dimension, and at a lower resolution.
            if counts and out.logits.shape[:-1] == batch["labels"].shape:
                labels = batch["labels"]
                correct = (out.logits.argmax(-1) == labels)[labels != IGNORED]
            if correct is not None:
                right, answers = right + int(correct.sum()), answers + correct.numel()
    finally:
        model.train(before)
    lost, all_items, correct_sum, all_answers = ranks.sum_parts([lost, items, right, answers])
    return EvaluationResult(
        loss=lost / all_items if all_items else math.nan,
        accuracy=correct_sum / all_answers if all_answers else None,
    )


def in_order(
    data: Data, size: int, job: Job, setup: Setup, device: torch.device, ranks: Ranks = ALONE
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield host batches of at most `size` samples in the dataset's order, each with True if its samples
    count. Each of several processes yields its own part. A process without remaining samples yields a batch
    that does not count. The loader has as many workers as in training.
    """
    order = SampleOrder(
        len(data.samples),
        size * ranks.data_ranks,
        1,
        seed=0,
        shuffle=False,
        rank=ranks.data_rank,
        ranks=ranks.data_ranks,
    )
    workers = loader_arguments(setup, device)["num_workers"]
    collate, steps = collate_for(job, setup, data.collate), order.steps_per_epoch
    batches = feed(data.samples, order, collate, start_step=0, stop_step=steps, workers=workers)
    with contextlib.closing(batches):
        for step, (batch,) in enumerate(batches):
            yield batch, bool(order.step(step)[0])
