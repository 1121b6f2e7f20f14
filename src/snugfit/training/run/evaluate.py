"""Going through evaluation data: the loss and, for classifiers, how many answers are right.

Nothing of the training moves: no gradients, no dropout, no random generator, and the model is left as it was
found. The loss is the mean over everything that counts in the whole data, however it is cut into batches.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snugfit.job.batch import IGNORED, label_items
from snugfit.job.inputs import has_classes
from snugfit.step.applier import loader_arguments
from snugfit.step.batches import place
from snugfit.step.loss import loss_of
from snugfit.training.ranks import ALONE, Ranks
from snugfit.training.run.loader import collate_for, feed
from snugfit.training.run.order import SampleOrder

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.step.wishes.mesh.pipeline import StagesInTurn
    from snugfit.techniques.setup import Setup
    from snugfit.training.run.run import Data


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """What the evaluation data says of a model."""

    loss: float
    """Mean over samples, or over tokens that carry a label."""

    accuracy: float | None
    """Share of right answers, from 0 to 1; None where the task has no classes to be right about."""

    def metric(self, name: str) -> float:
        """The value of `loss` or `accuracy`; NaN where there is none."""
        value = self.loss if name == "loss" else self.accuracy
        return math.nan if value is None else value


def evaluate(
    model: torch.nn.Module | StagesInTurn,
    job: Job,
    batches: Iterable[tuple[dict[str, Any], bool]],
    device: torch.device,
    autocast: contextlib.AbstractContextManager[Any],
    raise_if_stopping: Callable[[], None] = lambda: None,
    ranks: Ranks = ALONE,
    within: Callable[[dict[str, Any]], contextlib.AbstractContextManager[Any]] = lambda batch: (
        contextlib.nullcontext()
    ),
) -> Evaluated:
    """The model's loss and accuracy over host batches, each with whether it counts; over those of all
    processes, where there are several. Before each of them `raise_if_stopping` is called, which may abandon
    the evaluation; the model is called on each `within` a context, in which it may be a part of it."""
    import torch

    before = model.training
    model.eval()
    counts, lost, items, right, answers = has_classes(job.task) and job.labels > 1, 0.0, 0, 0, 0
    try:
        for host, is_counted in batches:
            raise_if_stopping()
            share = label_items(job, host) if is_counted else 0
            if not share and not ranks.are_many:  # others wait for what this one computes
                continue
            batch = place(host, device)
            with torch.no_grad(), autocast, within(batch):
                out: Any = model(**batch)
            if not share:
                continue
            lost += float(loss_of(out)) * share
            items += share
            if counts:
                labels = batch["labels"]
                valid = labels != IGNORED
                right += int(((out.logits.argmax(-1) == labels) & valid).sum())
                answers += int(valid.sum())
    finally:
        model.train(before)
    lost, all_items, all_right, all_answers = ranks.sum_parts([lost, items, right, answers])
    return Evaluated(
        loss=lost / all_items if all_items else math.nan,
        accuracy=all_right / all_answers if all_answers else None,
    )


def in_order(
    data: Data, size: int, job: Job, setup: Setup, device: torch.device, ranks: Ranks = ALONE
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Host batches of at most `size` samples, as the data lies, from as many workers as train; of several
    processes this one's part. With each, whether it counts: at the end a process may have none left."""
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
