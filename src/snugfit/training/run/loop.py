"""One optimizer step over real data: the plain loop's gradients, looked at before they change a weight.

gradients        the plain loop's own (`step/plain_loop.py`): micro-batches under autocast, each loss
                 scaled by its share of what the whole batch's loss is a mean over
unscale          fp16's gradients, back to their size
look             at the loss, and as far as that costs nothing at the gradients (`finite_check.py`). While the
                 device finishes, the host makes the next batch
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
from snugfit.training.run.finite_check import Look, all_numbers

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup
    from snugfit.training.checkpoint.state import Running


class Refused(SnugfitError):
    """A step was not made, for what its forward and backward passes gave. Nothing was updated."""

    name = "refused"
    """What its file is called after."""

    option = ""
    """The option that says what follows."""

    def __init__(self, what: str, loss: float, norm: float | None) -> None:
        super().__init__(f"{what}; no weight was changed.")
        self.loss, self.norm = loss, norm

    def write(self, folder: Path, step: int, pieces: Sequence[Sequence[int]]) -> Path:
        """Writes down which samples the step's micro-batches held, where that can be written; gives the
        file."""
        file = folder / f"{self.name}-step-{step}.json"
        document = {
            "step": step,
            "loss": repr(self.loss),
            "norm": repr(self.norm),
            "samples": [list(piece) for piece in pieces],
        }
        with contextlib.suppress(OSError):
            write_document(file, document)
        return file


class NonFinite(Refused):
    """A loss or a gradient is no number."""

    name, option = "nonfinite", "on_nonfinite"

    def __init__(self, loss: float, norm: float | None) -> None:
        of_norm = "A gradient is no number" if norm is None else f"The gradients' norm is {norm}"
        super().__init__(of_norm if math.isfinite(loss) else f"The loss is {loss}", loss, norm)


class Poisoned(SnugfitError):
    """Gradients of a step were no numbers, and its update has been made."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """An optimizer step that was taken."""

    loss: float
    """Mean over the global batch."""

    updated: bool
    """False when the gradient scaler found an overflow and left the weights as they were."""


WHAT_TO_TRY = (
    "Where more memory is free, the same run goes on from what was kept; a recipe that takes less, such as"
    " snugfit plan --memory finds, begins in a folder of its own."
)
"""When memory ran out for good."""


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
        self.computed = self._look.computed
        self._unlooked = False
        self.unread = False
        """Whether the last step's norm is still to be `read`."""
        self.careful = device.type != "cuda"
        """Wait for the gradients before each update. On the CPU there is nothing to wait for."""
        self.norm: float | None = None
        """Global L2 norm of the gradients, before clipping, of the last step that was `read`; None where the
        job does not clip."""
        self.refuses: Callable[[float], Refused | None] = lambda loss: None
        """Asked of a step's loss before its update: why it must not be made, or None."""
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
        still at the backward pass, when the step before has been `read`.

        Raises `Refused`, with every weight, state and generator of the update as it was and no gradients
        left; `Poisoned` when a step before must not have been; what torch raises when memory runs out.
        """
        optimizer, scaler = running.optimizer, running.scaler
        built = Built(running.model, optimizer, scaler, iter([list(pieces)]), self.phases)
        total = self._accumulate(built)
        self.phases.phase("clip")
        self.read(running)
        loss = math.nan if total is None else self._look.loss()
        if not math.isfinite(loss):
            optimizer.zero_grad(set_to_none=True)
            self.settle(running)
            raise NonFinite(loss, None)
        if (refused := self.refuses(loss)) is not None:
            optimizer.zero_grad(set_to_none=True)
            raise refused
        trained = [each for each in running.parameters if each.grad is not None]
        norm = self._norm_of(trained, running)
        self._look.taken(norm)
        meanwhile()
        self.device_was_busy = not self._look.is_done()
        self.unread = norm is not None
        if self.careful and scaler is None:
            self._refuse_no_numbers(running, trained, loss)
        elif self.careful:
            self.read(running)
        self._unlooked = not self.careful and norm is None and scaler is None
        updated = self._update(running, trained, norm)
        if updated:
            running.scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        self.phases.phase("load")
        return Taken(loss=loss, updated=updated)

    def read(self, running: Running) -> None:
        """Reads the last step's norm, where that was left for later. Raises `Poisoned` when it is none: the
        update has then made the weights none."""
        if self.unread:
            self.unread, self.norm = False, self._look.norm()
            if running.scaler is None and not math.isfinite(self.norm):
                raise Poisoned

    def settle(self, running: Running) -> None:
        """Before the weights are kept or used elsewhere: `read`, and where nobody has looked at gradients, a
        look at what they have made. Raises `Poisoned` when the weights are no numbers."""
        self.read(running)
        if self._unlooked:
            self._unlooked = False
            if not all_numbers(each for each in running.parameters if each.requires_grad):
                raise Poisoned

    def _norm_of(self, trained: list[torch.nn.Parameter], running: Running) -> torch.Tensor | None:
        import torch

        if not self.job.clip:
            return None
        if running.scaler is not None:
            running.scaler.unscale_(running.optimizer)
        return torch.nn.utils.get_total_norm([each.grad for each in trained if each.grad is not None])

    def _refuse_no_numbers(self, running: Running, trained: list[torch.nn.Parameter], loss: float) -> None:
        """Raises `NonFinite`; waits for the gradients."""
        clips, self.unread = self.unread, False
        self.norm = self._look.norm() if clips else None
        gradients = (each.grad for each in trained if each.grad is not None)
        sound = all_numbers(gradients) if self.norm is None else math.isfinite(self.norm)
        if not sound:
            running.optimizer.zero_grad(set_to_none=True)
            raise NonFinite(loss, self.norm)

    def _update(self, running: Running, trained: list[torch.nn.Parameter], norm: torch.Tensor | None) -> bool:
        """Whether there was one: a scaler leaves out the steps that overflow."""
        import torch

        if norm is not None:
            torch.nn.utils.clip_grads_with_norm_(trained, self.job.clip or 0.0, norm)
        self.phases.phase("update")
        optimizer, scaler = running.optimizer, running.scaler
        if scaler is None:
            optimizer.step()
            return True
        steps: list[bool] = []
        hook = optimizer.register_step_post_hook(lambda *_: steps.append(True))
        try:
            scaler.step(optimizer)
        finally:
            hook.remove()
        scaler.update()
        return bool(steps)
