"""A step of a hand-written loop: the training step with the user's loss function and count of loss terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, final

from snugfit.errors import UsageError
from snugfit.step.loss import loss_of
from snugfit.training.run.cut_loss import job_with_mixing, weighed_by_items
from snugfit.training.run.items import items_in, shifts_labels
from snugfit.training.run.loop import TrainingStep

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup

LossOf = Callable[[Any, dict[str, Any]], Any]
"""The type of a function that returns the loss of a batch on the device, a mean over the batch's items.
Arguments are the model and the batch.
"""

ItemsOf = Callable[[Mapping[str, Any]], float]
"""The type of a function that returns the number of items, or the sum of their weights, in the mean loss of a
batch.
"""


@final
class CustomStep(TrainingStep):
    """A training step that synchronizes with the device before each update, to check the gradients.

    A later check would have to repeat steps, and only the user's loop produces their batches.
    """

    def __init__(
        self,
        job: Job,
        setup: Setup,
        device: torch.device,
        *,
        model: torch.nn.Module,
        loss: LossOf | None,
        items: ItemsOf | None,
    ) -> None:
        super().__init__(job, setup, device)
        self.sync_before_update, shifts = True, shifts_labels(model)
        self.items_of = partial(items_in, shifts=shifts, dims=job.model.batch_dims)
        if items is not None:
            self.items_of = lambda piece: float(items(piece))
        self._piece_loss = weighed_by_items(partial(_value, loss), self.items_of)
        self.loss_of = partial(_loss, loss)

    def job_with_mixing(
        self, job: Job, model: Any, batch: Mapping[str, Any] | None = None, *, again: bool = False
    ) -> Job:
        """Return the job with the result of comparing the gradients of micro-batches with those of the whole
        batch.
        """
        return job_with_mixing(
            job,
            model,
            self._piece_loss,
            batch,
            max_pieces=self.rows,
            context=self.forward_context,
            again=again,
        )


def _value(loss_function: LossOf | None, model: Any, batch: Mapping[str, Any]) -> Any:
    """Return the result of the user's loss function, or without one the loss in the model's output."""
    output = model(**batch) if loss_function is None else loss_function(model, dict(batch))
    try:
        return loss_of(output)
    except (KeyError, IndexError, TypeError):
        return None


def _loss(loss_function: LossOf | None, model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    import torch

    loss = _value(loss_function, model, batch)
    if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
        source = "the function loss" if loss_function else f"{type(model).__name__}"
        raise UsageError(
            f"A step needs a loss: one number that depends on the model's parameters. But {source} gave "
            f"{_describe(loss)}. Put labels into the batch, or give loss=lambda model, batch: ..."
        )
    return loss


def _describe(loss: Any) -> str:
    if loss is None:
        return "none"
    if not hasattr(loss, "shape"):
        return f"{type(loss).__name__}"
    return f"a tensor of shape {tuple(loss.shape)}" if loss.dim() else "a number without a gradient"
