"""State of a fitted trainer's optimizer step. `FittedTrainer` owns it and creates one for each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class StepFigures(NamedTuple):
    """Figures of one step, read from the device before its update."""

    loss: float
    norm: float
    tokens: int


@dataclass(kw_only=True)
class StepState:
    """One optimizer step, from its micro-batches to its figures."""

    batches: list[Any] = field(default_factory=list)
    """The step's micro-batches, as the loader yields them."""

    micro_batch_index: int = 0
    """Number of started micro-batches."""

    item_counts: list[int] = field(default_factory=list)
    """Number of items in each micro-batch, once counted."""

    shares: torch.Tensor | None = None
    """Weights of the micro-batches, (n,) on the device, when several processes share one batch."""

    share: float | torch.Tensor | None = None
    """Weight of the current micro-batch among the batch's items; None in an evaluation."""

    loss_sum: torch.Tensor | None = None
    """The weighted losses of the micro-batches so far, () on the device."""

    pending_micro_batches: int = 0
    """Micro-batches of a started step without an update so far; 0 without such a step."""

    rng_at_step_start: tuple[torch.Tensor, ...] = ()
    """States of the generators of a forward pass at the start of the step."""

    logged_loss_at_start: torch.Tensor | None = None
    """The Trainer's losses since its last log at the start of the step, () on the device."""

    figures: StepFigures | None = None
    """Figures of the step; None before the end of its last micro-batch."""

    def following(self, batches: list[Any]) -> StepState:
        """Return the next step, with the count of this one's micro-batches that got no update."""
        return StepState(
            batches=batches,
            pending_micro_batches=self.pending_micro_batches,
            logged_loss_at_start=self.logged_loss_at_start,
        )
