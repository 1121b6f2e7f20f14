"""Where a fitted trainer is in its optimizer step. `FittedTrainer` owns it and makes one for each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class StepFigures(NamedTuple):
    """What one step came to, read from the device before its update."""

    loss: float
    norm: float
    tokens: int


@dataclass(kw_only=True)
class StepState:
    """One optimizer step, from its micro-batches to its figures."""

    batches: list[Any] = field(default_factory=list)
    """The step's micro-batches, as the loader gives them."""

    micro_batch_index: int = 0
    """How many of them were begun."""

    item_counts: list[int] = field(default_factory=list)
    """Items of each of them, once they were counted."""

    shares: torch.Tensor | None = None
    """What each micro-batch counts for, (n,) on the device, where several processes have one batch."""

    share: float | torch.Tensor | None = None
    """Of the batch's items, those of the micro-batch that is being trained; None in an evaluation."""

    loss_sum: torch.Tensor | None = None
    """The weighed losses of the micro-batches so far, () on the device."""

    pending_micro_batches: int = 0
    """Micro-batches of the step that has begun and not come to its update; 0 where there is none."""

    rng_at_step_start: tuple[torch.Tensor, ...] = ()
    """States of the generators of a forward pass when the step began."""

    logged_loss_at_start: torch.Tensor | None = None
    """What the Trainer's losses since its last log came to when the step began, () on the device."""

    figures: StepFigures | None = None
    """What the step came to; None before its last micro-batch is done."""

    def following(self, batches: list[Any]) -> StepState:
        """The next step. What this one leaves without an update is known to it."""
        return StepState(
            batches=batches,
            pending_micro_batches=self.pending_micro_batches,
            logged_loss_at_start=self.logged_loss_at_start,
        )
