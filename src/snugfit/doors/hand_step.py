"""A step of a hand-written loop: the training step, with a loss and a count of items of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, final

from snugfit.doors.items import items_in, shifts_labels
from snugfit.errors import UsageError
from snugfit.step.loss import loss_of
from snugfit.training.loop import TrainingStep

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup

LossOf = Callable[[Any, dict[str, Any]], Any]
"""Of a model and a batch on the device: the loss, a mean over the batch's items."""

ItemsOf = Callable[[Mapping[str, Any]], int]
"""Of a batch: how many items its loss is a mean over."""


@final
class HandStep(TrainingStep):
    """Waits for the gradients before each update: only whoever makes the batches could take steps again."""

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
        self.careful = True
        self._given_loss, self._given_items = loss, items
        self._shifts = shifts_labels(model)

    def _items(self, piece: Mapping[str, Any]) -> int:
        if self._given_items is not None:
            return int(self._given_items(piece))
        return items_in(piece, shifts=self._shifts)

    def _loss(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        import torch

        found = model(**batch) if self._given_loss is None else self._given_loss(model, dict(batch))
        try:
            loss = loss_of(found)
        except (KeyError, IndexError, TypeError):
            loss = None
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
            what = "the function loss" if self._given_loss else f"{type(model).__name__}"
            raise UsageError(
                f"A step needs one number that the model's parameters have made, and {what} gave"
                f" {_told(loss)}. Put labels into the batch, or give loss=lambda model, batch: ..."
            )
        return loss


def _told(loss: Any) -> str:
    if loss is None:
        return "none"
    if not hasattr(loss, "shape"):
        return f"{type(loss).__name__}"
    return f"a tensor of shape {tuple(loss.shape)}" if loss.dim() else "a number without a gradient"
