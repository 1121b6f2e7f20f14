"""One optimizer step over real data: the plain loop's gradients, looked at before they change a weight.

gradients        the plain loop's own (`step/plain_loop.py`): micro-batches under autocast, each loss
                 scaled by its share of what the whole batch's loss is a mean over
unscale          fp16's gradients, back to their size
look             at loss and gradients (`look.py`): what is no number stops here, and no weight has changed.
                 While the device finishes, the host makes the next batch
clip             by the norm that was just taken
update           optimizer, gradient scaler, learning rate
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError
from snugfit.step.memory_errors import memory_cause
from snugfit.step.plain_loop import Built, PlainStep
from snugfit.training.look import Look

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup
    from snugfit.training.state import Running


class NonFinite(SnugfitError):
    """A loss or a gradient is no number. Nothing was updated."""

    def __init__(self, loss: float, norm: float | None) -> None:
        of_norm = "A gradient is no number" if norm is None else f"The gradients' norm is {norm}"
        what = of_norm if math.isfinite(loss) else f"The loss is {loss}"
        super().__init__(f"{what}; no weight was changed.")
        self.loss, self.norm = loss, norm


@dataclass(frozen=True, kw_only=True)
class Taken:
    """An optimizer step that was taken."""

    loss: float
    """Mean over the global batch."""

    norm: float | None
    """Global L2 norm of the gradients, before clipping; None where the job does not clip."""

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


def _nothing() -> None:
    """Nothing is to be done meanwhile."""


class TrainingStep(PlainStep):
    """Optimizer steps of one job and Setup, over micro-batches that are handed in."""

    def __init__(self, job: Job, setup: Setup, device: torch.device) -> None:
        super().__init__(job, setup, device, keep_losses=True)
        self.phases = Phases()
        self._look = Look(device)
        self.device_was_busy = False
        """Whether, when the host had done what it had to do, the last step's device had not."""

    def attempt(
        self, running: Running, pieces: Sequence[dict[str, Any]], meanwhile: Callable[[], None] = _nothing
    ) -> Taken | Exhausted:
        """`take`, where the end of memory is an answer and no exception, whose traceback would hold the
        step's tensors."""
        exhausted = None
        try:
            return self.take(running, pieces, meanwhile)
        except Exception as error:
            cause = memory_cause(error)
            if cause is None:
                raise
            exhausted = Exhausted(cause=cause, phase=self.phases.now, message=str(error))
        running.optimizer.zero_grad(set_to_none=True)
        return exhausted

    def take(
        self, running: Running, pieces: Sequence[dict[str, Any]], meanwhile: Callable[[], None] = _nothing
    ) -> Taken:
        """One optimizer step over these host micro-batches (B, S). `meanwhile` is done while the device is
        still at the backward pass.

        Raises `NonFinite`, with every weight, state and generator of the update as it was and no gradients
        left; raises what torch raises when memory runs out.
        """
        optimizer, scaler = running.optimizer, running.scaler
        built = Built(running.model, optimizer, scaler, iter([list(pieces)]), self.phases)
        total = self._accumulate(built)
        if total is None:
            optimizer.zero_grad(set_to_none=True)
            raise NonFinite(math.nan, None)
        self.phases.phase("clip")
        if scaler is not None:
            scaler.unscale_(optimizer)
        trained = [each for each in running.model.parameters() if each.grad is not None]
        norm, clips = self._asked(total, trained, running), bool(self.job.clip)
        meanwhile()
        self.device_was_busy = not self._look.is_done()
        seen = self._look.end(clips=clips)
        overflown = scaler is not None and not seen.gradients_are_numbers
        if not math.isfinite(seen.loss) or not (overflown or seen.gradients_are_numbers):
            optimizer.zero_grad(set_to_none=True)
            raise NonFinite(seen.loss, seen.norm)
        self._update(running, trained, norm)
        if not overflown:
            running.scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        self.phases.phase("load")
        return Taken(loss=seen.loss, norm=seen.norm, updated=not overflown)

    def _asked(
        self, total: torch.Tensor, trained: list[torch.nn.Parameter], running: Running
    ) -> torch.Tensor | None:
        overflows = None
        if running.scaler is not None:
            overflows = list(running.scaler._found_inf_per_device(running.optimizer).values())
        return self._look.begin(total, trained, clips=bool(self.job.clip), overflows=overflows)

    def _update(self, running: Running, trained: list[torch.nn.Parameter], norm: torch.Tensor | None) -> None:
        import torch

        if norm is not None:
            torch.nn.utils.clip_grads_with_norm_(trained, self.job.clip or 0.0, norm)
        self.phases.phase("update")
        if running.scaler is None:
            running.optimizer.step()
        else:
            running.scaler.step(running.optimizer)
            running.scaler.update()
