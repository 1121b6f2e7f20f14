"""One optimizer step over real data: the plain loop's gradients, looked at before they change a weight.

gradients        the plain loop's own (`step/plain_loop.py`): micro-batches under autocast, each loss
                 scaled by its share of what the whole batch's loss is a mean over
unscale          fp16's gradients, back to their size
look             at loss and gradients (`look.py`). While the device finishes, the host makes the next batch
clip             by the norm that was just taken
update           optimizer, gradient scaler, learning rate
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.documents import write_document
from snugfit.errors import SnugfitError
from snugfit.step.memory_errors import memory_cause
from snugfit.step.plain_loop import Built, PlainStep
from snugfit.training.look import Look, Seen

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

    def write(self, folder: Path, step: int, pieces: Sequence[Sequence[int]]) -> Path:
        """Writes down which samples the step's micro-batches held, where that can be written; gives the
        file."""
        file = folder / f"nonfinite-step-{step}.json"
        document = {
            "step": step,
            "loss": repr(self.loss),
            "norm": repr(self.norm),
            "samples": [list(piece) for piece in pieces],
        }
        with contextlib.suppress(OSError):
            write_document(file, document)
        return file


class Poisoned(SnugfitError):
    """The last step's gradients were no numbers, and its update has been made."""


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
        self._look, self._unread = Look(device), False
        self.careful = device.type != "cuda"
        """Wait for the gradients before each update. On the CPU there is nothing to wait for."""
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
        left; `Poisoned` when the step before must not have been; what torch raises when memory runs out.
        """
        optimizer, scaler = running.optimizer, running.scaler
        built = Built(running.model, optimizer, scaler, iter([list(pieces)]), self.phases)
        total = self._accumulate(built)
        self.phases.phase("clip")
        self.settle()
        loss = math.nan if total is None else self._look.loss()
        if not math.isfinite(loss):
            optimizer.zero_grad(set_to_none=True)
            raise NonFinite(loss, None)
        if scaler is not None:
            scaler.unscale_(optimizer)
        trained = [each for each in running.parameters if each.grad is not None]
        norm = self._ask(trained, running)
        meanwhile()
        self.device_was_busy = not self._look.is_done()
        seen = self._answer(running)
        overflown = scaler is not None and not seen.gradients_are_numbers
        if not (overflown or seen.gradients_are_numbers):
            optimizer.zero_grad(set_to_none=True)
            raise NonFinite(loss, seen.norm)
        self._update(running, trained, norm)
        if not overflown:
            running.scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        self.phases.phase("load")
        return Taken(loss=loss, norm=seen.norm, updated=not overflown)

    def settle(self) -> None:
        """Reads what is still unread of the last step's gradients. Raises `Poisoned` when they were no
        numbers: the last update then made the weights none."""
        if self._unread:
            self._unread = False
            if not self._look.end(clips=False).gradients_are_numbers:
                raise Poisoned

    def _computed(self, total: torch.Tensor) -> None:
        self._look.computed(total)

    def _ask(self, trained: list[torch.nn.Parameter], running: Running) -> torch.Tensor | None:
        overflows = None
        if running.scaler is not None:
            overflows = list(running.scaler._found_inf_per_device(running.optimizer).values())
        return self._look.begin(trained, clips=bool(self.job.clip), overflows=overflows)

    def _answer(self, running: Running) -> Seen:
        """What the look saw; taken to be well, and read at the next step, where nobody has to wait for it."""
        clips = bool(self.job.clip)
        self._unread = not (self.careful or clips or running.scaler is not None)
        if self._unread:
            return Seen(gradients_are_numbers=True, norm=None)
        return self._look.end(clips=clips)

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
