"""One optimizer step over real data: the plain loop's gradients, looked at before they change a weight.

    gradients        the plain loop's own (`step/plain_loop.py`): micro-batches under autocast, each loss
                     scaled by its share of what the whole batch's loss is a mean over
    unscale          fp16's gradients, back to their size
    look             the loss and the gradients' norm come to the host, together: the one moment of a step in
                     which the host waits for the device. What is no number stops here, and no weight has
                     changed
    clip             by the norm that was just taken
    update           optimizer, gradient scaler, learning rate

The host's wait costs a step what the host would have been ahead by; in exchange a run cannot go on with
weights that are no numbers, and each step's loss is known when it is done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError
from snugfit.step.memory_errors import memory_cause
from snugfit.step.plain_loop import Built, PlainStep

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup
    from snugfit.training.state import Running


class NonFinite(SnugfitError):
    """A loss or a gradient is no number. Nothing was updated."""

    def __init__(self, loss: float, norm: float) -> None:
        what = f"The loss is {loss}" if not math.isfinite(loss) else f"The gradients' norm is {norm}"
        super().__init__(f"{what}; no weight was changed.")
        self.loss, self.norm = loss, norm


@dataclass(frozen=True, kw_only=True)
class Taken:
    """An optimizer step that was taken."""

    loss: float
    """Mean over the global batch."""

    norm: float
    """Global L2 norm of the gradients, before clipping."""

    updated: bool
    """False when the gradient scaler found an overflow and left the weights as they were."""


@dataclass(frozen=True, kw_only=True)
class Exhausted:
    """Memory ran out in a step. Gradients are dropped; weights have changed only if it was in the update."""

    cause: str
    """As `memory_cause` calls it."""

    phase: str
    """Where in the step."""

    message: str
    """What the exception said."""


class Phases:
    """An observer that remembers where a step is, for whoever must say where it broke."""

    def __init__(self) -> None:
        self.now = "build"

    def step_begins(self, index: int) -> None:
        """Not needed here."""

    def step_ends(self, index: int) -> None:
        """Not needed here."""

    def phase(self, name: str) -> None:
        """From here on the step is there."""
        self.now = name

    def built(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Not needed here."""


class TrainingStep(PlainStep):
    """Optimizer steps of one job and Setup, over micro-batches that are handed in."""

    def __init__(self, job: Job, setup: Setup, device: torch.device) -> None:
        super().__init__(job, setup, device, keep_losses=True)
        self.phases = Phases()

    def attempt(self, running: Running, pieces: Sequence[dict[str, Any]]) -> Taken | Exhausted:
        """`take`, where the end of memory is an answer and no exception, whose traceback would hold the
        step's tensors."""
        exhausted = None
        try:
            return self.take(running, pieces)
        except Exception as error:
            cause = memory_cause(error)
            if cause is None:
                raise
            exhausted = Exhausted(cause=cause, phase=self.phases.now, message=str(error))
        running.optimizer.zero_grad(set_to_none=True)
        return exhausted

    def take(self, running: Running, pieces: Sequence[dict[str, Any]]) -> Taken:
        """One optimizer step over these host micro-batches (B, S).

        Raises `NonFinite`, with every weight, state and generator of the update as it was and no gradients
        left; raises what torch raises when memory runs out.
        """
        import torch

        optimizer, scaler = running.optimizer, running.scaler
        built = Built(running.model, optimizer, scaler, iter([list(pieces)]), self.phases)
        total = self._accumulate(built)
        if total is None:
            optimizer.zero_grad(set_to_none=True)
            raise NonFinite(math.nan, math.nan)
        self.phases.phase("clip")
        if scaler is not None:
            scaler.unscale_(optimizer)
        trained = [each for each in running.model.parameters() if each.grad is not None]
        total_norm = torch.nn.utils.get_total_norm([each.grad for each in trained if each.grad is not None])
        loss, norm = torch.stack([total.float(), total_norm.float()]).tolist()
        overflown = scaler is not None and not math.isfinite(norm)
        if not math.isfinite(loss) or not (overflown or math.isfinite(norm)):
            optimizer.zero_grad(set_to_none=True)
            raise NonFinite(loss, norm)
        if self.job.clip:
            torch.nn.utils.clip_grads_with_norm_(trained, self.job.clip, total_norm)
        self.phases.phase("update")
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if not overflown:
            running.scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        self.phases.phase("load")
        return Taken(loss=loss, norm=norm, updated=not overflown)
