"""One optimizer step over real data: the plain loop's gradients, checked before they change a weight.

gradients        the plain loop's own (`step/plain_loop.py`): micro-batches under autocast, each loss
                 scaled by its share of what the whole batch's loss is a mean over
unscale          fp16's gradients, back to their size
check            the loss, and as far as that costs nothing the gradients (`finite_check.py`). While the
                 device finishes, the host makes the next batch
clip             by the norm that was just taken
update           optimizer, gradient scaler, learning rate

Where gradients do not stay (`updates/released.py`), the update is a part of a backward pass: of a second one,
where their norm must be known, and the checks stand between the two; or of the only one, and then the loss is
read before it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.documents import write_document
from snugfit.errors import SnugfitError
from snugfit.step.applier import after_update
from snugfit.step.memory_errors import memory_cause
from snugfit.step.plain_loop import Built, PlainStep
from snugfit.step.step import Observer
from snugfit.step.wishes.mesh.spread_tensors import gradient_norm, scale, whole
from snugfit.training.recovery import Exhausted
from snugfit.training.run.finite_check import FiniteCheck, all_finite

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.step.wishes.updates.released import ReleasedPasses
    from snugfit.techniques.setup import Setup
    from snugfit.training.checkpoint.state import TrainState
    from snugfit.training.run.exchange import StepExchange


class StepRejected(SnugfitError):
    """A step was not made, for what its forward and backward passes gave. Nothing was updated."""

    name = "refused"
    """The beginning of the name of the file that names its samples."""

    option = ""
    """The option of a run that says what follows."""

    def __init__(self, what: str, loss: float, norm: float | None) -> None:
        super().__init__(f"{what}. No weight was changed.")
        self.loss, self.norm = loss, norm

    def write(self, folder: Path, step: int, micro_batches: Sequence[Sequence[int]]) -> Path:
        """Writes down the indices of the samples of each of the step's micro-batches, where that can be
        written; gives the file."""
        file = folder / f"{self.name}-step-{step}.json"
        document = {
            "step": step,
            "loss": repr(self.loss),
            "norm": repr(self.norm),
            "samples": [list(indices) for indices in micro_batches],
        }
        with contextlib.suppress(OSError):
            write_document(file, document)
        return file


class NonFinite(StepRejected):
    """A step was not made, for a loss or a gradient that is no number."""

    name, option = "nonfinite", "on_nonfinite"

    def __init__(self, loss: float, norm: float | None) -> None:
        of_norm = "A gradient is not a number" if norm is None else f"The gradients' norm is {norm}"
        super().__init__(of_norm if math.isfinite(loss) else f"The loss is {loss}", loss, norm)


class WeightsNonFinite(SnugfitError):
    """Gradients of a step were no numbers, and its update has been made with them."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """An optimizer step that was taken."""

    loss: float
    """Mean over the global batch."""

    updated: bool
    """False when the gradient scaler found an overflow and left the weights as they were."""


class PhaseTracker(Observer):
    """An observer that remembers where a step is, for whoever must say where it broke."""

    def __init__(self) -> None:
        self.now = "build"

    def phase(self, name: str) -> None:
        """The step is in this phase from here on."""
        self.now = name


def _nothing() -> None:
    """Nothing is to be done meanwhile."""


class TrainingStep(PlainStep):
    """Optimizer steps of one job and Setup, over micro-batches that are handed in."""

    def __init__(
        self, job: Job, setup: Setup, device: torch.device, exchange: StepExchange | None = None
    ) -> None:
        super().__init__(job, setup, device, keep_losses=True)
        self._exchange = exchange
        self.idle: Sequence[bool] = ()
        """Whether nothing of a micro-batch counts that is computed because other processes wait for it."""
        self.phases = PhaseTracker()
        self._check = FiniteCheck(device)
        self.computed = self._hear_loss
        self._asked_of_loss: Callable[[], Any] = _nothing
        """Called when the device is asked for a step's loss, before its backward pass."""
        self._unchecked = False
        self._taken = 0
        self.unread = False
        """Whether the last step's norm is still to be read (`read_norm`)."""
        self.sync_before_update = device.type != "cuda" and (self.released is None or bool(job.clip))
        """Whether gradients are waited for before each update. On the CPU there is nothing to wait for,
        unless gradients do not stay, and it takes passes of its own to know of all."""
        self.norm: float | None = None
        """Global L2 norm of the gradients, before clipping, of the last step whose norm was read; None where
        the job does not clip."""
        self.rejects: Callable[[float], StepRejected | None] = lambda loss: None
        """Asked of a step's loss before its update: why it must not be made, or None."""
        self.device_was_busy = False
        """Whether, when the host had done what it had to do, the last step's device had not."""

    def attempt(
        self,
        state: TrainState,
        micro_batches: Sequence[dict[str, Any]],
        meanwhile: Callable[[], None] = _nothing,
    ) -> StepResult | Exhausted:
        """`take`, where the end of memory is an answer and no exception, whose traceback would hold the
        step's tensors."""
        exhausted = None
        try:
            return self.take(state, micro_batches, meanwhile)
        except Exception as error:
            cause = memory_cause(error)
            if cause is None:
                raise
            has_begun = self.released is not None and self.released.has_begun
            phase = "update" if has_begun else self.phases.now
            exhausted = Exhausted(cause=cause, phase=phase, message=str(error))
        state.optimizer.zero_grad(set_to_none=True)
        return exhausted

    def take(
        self,
        state: TrainState,
        micro_batches: Sequence[dict[str, Any]],
        meanwhile: Callable[[], None] = _nothing,
    ) -> StepResult:
        """One optimizer step over these host micro-batches (B, ...). `meanwhile` is done while the device is
        still at the backward pass, when the norm of the step before has been read.

        Raises `StepRejected`, with every weight, state and generator of the update as it was and no gradients
        left; `WeightsNonFinite` when a step before must not have been made; what torch raises when memory
        runs out.
        """
        optimizer, scaler = state.optimizer, state.scaler
        pieces = iter([list(micro_batches)])
        built = Built(state.model, state.runs or state.model, optimizer, scaler, pieces, self.phases)
        updates_at_once = self.released is not None and not self.needs_norm()
        self._asked_of_loss = partial(self._read_loss, state) if updates_at_once else _nothing
        total = self._accumulate(built)
        loss = self._check.loss() if updates_at_once else self._read_loss(state, has_one=total is not None)
        updated = self._check_and_update(state, built, loss, meanwhile)
        if updated:
            state.scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        after_update(self.setup, built.runs, self._taken)
        self._taken += 1
        self.phases.phase("load")
        return StepResult(loss=loss, updated=updated)

    def _read_loss(self, state: TrainState, *, has_one: bool = True) -> float:
        """The step's loss, of whose passes the host has asked the device. Raises `StepRejected` where it must
        not be made."""
        self.phases.phase("clip")
        self.read_norm(state)
        loss = self._check.loss() if has_one else math.nan
        if self._exchange is not None:
            loss = self._exchange.loss(loss)
        if not math.isfinite(loss):
            state.optimizer.zero_grad(set_to_none=True)
            self.check_weights(state)
            raise NonFinite(loss, None)
        if (rejection := self.rejects(loss)) is not None:
            state.optimizer.zero_grad(set_to_none=True)
            raise rejection
        return loss

    def needs_norm(self) -> bool:
        """Where the job clips, and while gradients are waited for."""
        return super().needs_norm() or self.sync_before_update

    def is_captured(self) -> bool:
        """Not while gradients are looked at on the host, which does not know where those of a step that is
        played back lie; of their norm it does."""
        return super().is_captured() and (not self.sync_before_update or bool(self.job.clip))

    def _check_and_update(
        self, state: TrainState, built: Built, loss: float, meanwhile: Callable[[], None]
    ) -> bool:
        """After a step's passes, whose loss is a number: whether there was an update. Raises `NonFinite`."""
        if self.released is not None:
            return self._check_and_release(self.released, state, loss, meanwhile)
        scaler = state.scaler
        trained = [weight for weight in state.parameters if weight.grad is not None]
        captured = self.captured if self.is_captured() else None
        is_played = captured is not None and captured.is_played
        norm = captured.norm if captured and is_played else self._norm_of(trained, state)
        self._check.record_norm(norm)
        meanwhile()
        self.device_was_busy = not self._check.is_done()
        self.unread = norm is not None
        if self.sync_before_update and scaler is None:
            self._raise_if_non_finite(state, trained, loss)
        elif self.sync_before_update:
            self.read_norm(state)
        self._unchecked = not self.sync_before_update and norm is None and scaler is None
        if captured is not None:
            captured.update(built, norm)
            return True
        return self._update(state, trained, norm)

    def _check_and_release(
        self, released: ReleasedPasses, state: TrainState, loss: float, meanwhile: Callable[[], None]
    ) -> bool:
        """The same where gradients do not stay: what is known of them is their norm, if it was needed."""
        norm, clips = released.norm, bool(self.job.clip)
        self._check.record_norm(norm)
        meanwhile()
        self.device_was_busy = not self._check.is_done()
        self._unchecked = norm is None
        self.unread = clips and not self.sync_before_update
        if self.sync_before_update:
            length = self._check.norm()
            self.norm = length if clips else None
            if not math.isfinite(length):
                state.optimizer.zero_grad(set_to_none=True)
                raise NonFinite(loss, self.norm)
        released.update()
        return True

    def _weights_of(self, pieces: Sequence[Mapping[str, Any]]) -> Sequence[float | None]:
        """Over the items of all processes. Labels of a micro-batch that has nothing that counts are set, for
        a mean over nothing is no number, not even times 0."""
        if self._exchange is None or not self._exchange.ranks.are_many:
            return super()._weights_of(pieces)
        idle = self.idle or [False] * len(pieces)
        items = [0 if skipped else self.items_of(piece) for piece, skipped in zip(pieces, idle, strict=True)]
        for piece, share in zip(pieces, items, strict=True):
            if not share and "labels" in piece and not piece["labels"].is_floating_point():
                piece["labels"].clamp_(min=0)
        return self._exchange.weights(pieces, items)

    def _hear_loss(self, total: torch.Tensor) -> None:
        self._check.record_loss(total)
        if self._exchange is not None and self.device.type == "cpu":
            self._exchange.forward_ends()
        self._asked_of_loss()

    def read_norm(self, state: TrainState) -> None:
        """Reads the last step's norm, where that was left for later. Raises `WeightsNonFinite` when it is no
        number: the update has then made the weights none."""
        if self.unread:
            self.unread, self.norm = False, self._check.norm()
            if state.scaler is None and not math.isfinite(self.norm):
                raise WeightsNonFinite

    def check_weights(self, state: TrainState) -> None:
        """Before the weights are kept or used elsewhere: `read_norm`, and where nobody has checked the
        gradients, a check of what they have made. Raises `WeightsNonFinite` when the weights are no
        numbers."""
        self.read_norm(state)
        if self._unchecked:
            self._unchecked = False
            sound = all_finite(weight for weight in state.parameters if weight.requires_grad)
            if not self._is_so_in_all_stages(sound):
                raise WeightsNonFinite

    def _is_so_in_all_stages(self, is_so: bool) -> bool:
        """Whether this is so in all processes, where each has gradients and weights of its own layers; else
        in this one, which has what all have."""
        if self.passes is None or self._exchange is None:
            return is_so
        return not self._exchange.ranks.sum([float(not is_so)])[0]

    def _norm_of(self, trained: list[torch.nn.Parameter], state: TrainState) -> torch.Tensor | None:
        if not self.job.clip:
            return None
        if state.scaler is not None:
            state.scaler.unscale_(state.optimizer)
        if self.passes is not None:
            return self.passes.norm_of_all(trained)
        return whole(gradient_norm(state.optimizer, trained))

    def _raise_if_non_finite(self, state: TrainState, trained: list[torch.nn.Parameter], loss: float) -> None:
        """Raises `NonFinite`; waits for the gradients."""
        clips, self.unread = self.unread, False
        self.norm = self._check.norm() if clips else None
        gradients = (weight.grad for weight in trained if weight.grad is not None)
        sound = all_finite(gradients) if self.norm is None else math.isfinite(self.norm)
        sound = self._is_so_in_all_stages(sound)
        if not sound:
            state.optimizer.zero_grad(set_to_none=True)
            raise NonFinite(loss, self.norm)

    def _update(
        self, state: TrainState, trained: list[torch.nn.Parameter], norm: torch.Tensor | None
    ) -> bool:
        """Whether there was one: a scaler leaves out the steps that overflow."""
        if norm is not None:
            scale(trained, self.job.clip or 0.0, norm, state.optimizer)
        self.phases.phase("update")
        optimizer, scaler = state.optimizer, state.scaler
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
