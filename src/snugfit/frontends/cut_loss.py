"""Whether a batch in pieces is the whole batch, found out with a few samples of the user's own.

The loss of some samples together is compared with that of two halves, each counted by its items, without
gradients and without dropout. Where they differ, samples look at each other (in-batch negatives, statistics
of a batch), or the loss is no mean; then no plan and no recovery cuts the batch. Asked when a cut is first
wanted. What stays unseen: samples that look at each other in a way that few of them, or the few digits of a
16-bit model, do not show. Batch norms, which evaluate here, are found by their class.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from snugfit.errors import one_line
from snugfit.frontends.items import items_in, shifts_labels
from snugfit.job.batch_layout import BatchLayout, map_leaves
from snugfit.job.sample_mixing import mixing_of
from snugfit.training.rng import preserve_rng

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job

SAMPLES = 4
"""Of which the loss is taken, where the batch has so many."""

TOLERANCE, TOLERANCE_OF_16_BIT = 0.01, 0.05
"""Relative difference of two losses that are taken to be the same. In fp32, sums in another order differ by a
few parts in a million; the balance of experts, which counts for a hundredth of a loss, stays below too."""

LossOf = Callable[[Any, dict[str, Any]], Any]
"""Of the model and a batch on its device: the loss, ()."""


def job_with_mixing(
    job: Job,
    model: Any,
    loss_of: LossOf,
    items_of: Callable[[Mapping[str, Any]], int] | None = None,
    example: Mapping[str, Any] | None = None,
) -> Job:
    """The job, with a reason in `mixes_samples` where this live model's loss is no mean over samples: those
    of the job's own example, or of this one."""
    if mixing_of(job).reason:
        return job
    if items_of is None:
        shifts = shifts_labels(model)

        def items_of(piece: Mapping[str, Any]) -> int:
            return items_in(piece, shifts=shifts, dims=job.model.batch_dims)

    try:
        reason = _difference(job, example or job.model.example or {}, model, loss_of, items_of)
    except Exception as fault:  # whatever the user's loss raises outside of training
        kind = f"{type(fault).__name__}: {one_line(fault)}"
        warnings.warn(f"It is not known whether the loss is a mean over samples: {kind}", stacklevel=2)
        return job
    return replace(job, mixes_samples=reason) if reason else job


def _difference(
    job: Job,
    example: Mapping[str, Any],
    model: Any,
    loss_of: LossOf,
    items_of: Callable[[Mapping[str, Any]], int],
) -> str:
    import torch

    layout = BatchLayout.of(example, job.model.batch_dims, samples=job.batch_size)
    count = min(SAMPLES, layout.samples) // 2 * 2
    if not count or layout.unclear:
        return ""
    first = next(model.parameters())
    edges = ((0, count), (0, count // 2), (count // 2, count))
    parts = [layout.part(example, start, stop) for start, stop in edges]
    items = [items_of(part) for part in parts]
    if not items[0]:
        return ""

    def value_of(part: dict[str, Any]) -> float:
        moved = map_leaves(part, lambda _, value: value.to(first.device) if torch.is_tensor(value) else value)
        return float(loss_of(model, moved))

    with preserve_rng(first.device), torch.no_grad(), _as_it_was(model):
        losses = [value_of(part) if weight else 0.0 for part, weight in zip(parts, items, strict=True)]
    together = losses[0]
    cut = sum(loss * weight for loss, weight in zip(losses[1:], items[1:], strict=True)) / items[0]
    tolerance = TOLERANCE if first.element_size() > 2 else TOLERANCE_OF_16_BIT
    if not abs(together - cut) > tolerance * max(abs(together), abs(cut)):  # what is no number tells nothing
        return ""
    return f"the loss of {count} samples is {together:.4g} together and {cut:.4g} in two halves"


@contextlib.contextmanager
def _as_it_was(model: torch.nn.Module) -> Iterator[None]:
    """Within it the model evaluates; afterwards its buffers, and what its modules have in plain attributes,
    their modes too, are what they were."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with contextlib.ExitStack() as unchanged:
        for module in model.modules():
            unchanged.enter_context(unchanged_attributes(module))
        model.eval()
        yield
    for buffer, value in buffers:
        buffer.copy_(value)


@contextlib.contextmanager
def unchanged_attributes(holder: Any) -> Iterator[None]:
    """What an object counts and collects within it is afterwards forgotten: a Trainer's own loss may gather
    figures for its log."""
    containers = [
        (value, _copy_containers(value))
        for name, value in vars(holder).items()
        if isinstance(value, dict | list) and not name.endswith("dataset")
    ]
    with patch.dict(vars(holder)):
        try:
            yield
        finally:
            for value, content in containers:  # others may hold it too
                value.clear()
                (value.update if isinstance(value, dict) else value.extend)(content)


def _copy_containers(value: Any) -> Any:
    """Dicts and lists once more, of the same classes; what they hold stays what it is."""
    if isinstance(value, dict | list):
        pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
        value = copy(value)
        for key, item in pairs:
            value[key] = _copy_containers(item)
    return value
