"""One optimizer step over real data: the plain loop's gradients, checked before they change a weight.

| phase     | work                                                                                        |
|-----------|---------------------------------------------------------------------------------------------|
| gradients | the plain loop's own (`step/plain_loop.py`): micro-batches under autocast. Each loss is     |
|           | scaled by its share of the items in the whole batch's mean.                                 |
| unscale   | fp16's gradients, back to their size                                                        |
| check     | the loss, and the gradients if that costs nothing (`FiniteCheck`). The host prepares        |
|           | the next batch during the device's remaining work.                                          |
| clip      | by the norm of the check                                                                    |
| update    | optimizer, gradient scaler, learning rate                                                   |

Some runners (`step/step_runner.py`) update weights within the backward pass. If the gradient norm is needed,
they run a second backward pass for the update, and the checks come between the two. Otherwise there is a
single backward pass, and the loss is read before it.

The loss is known after the forward pass. It is then copied to page-locked memory, and the host reads it
during the device's backward pass, without waiting.

The gradients are known at the end of the backward pass. Waiting for them leaves the device idle until the
host has launched the update. With such a loop, BERT-large at 4 x 512 in fp32 took an H200 5.7 % longer than
the bare loop. This includes all other work. A check without waiting still reads and writes all gradients once
more: 1.6 % in tf32. On a device neither is done, unless `sync_before_update` is set
(train-overhead-waiting.json, -looking.json and, as it is now, train-overhead.json under
results/h200-2026-11-22):

- If the job clips, the norm is computed anyway; it is read one step later.
- A gradient scaler has a check of its own, and omits steps that overflow.
- Without both, a NaN gradient makes NaN weights, and these make the next loss NaN. Weights are checked before
  they are saved or used elsewhere.

After a wrong update a run is resumed from its last correct state (`session.py`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.documents import write_document
from snugfit.errors import SnugfitError
from snugfit.step.applier import after_update
from snugfit.step.clipping import gradient_norm, scale, tensor_parts
from snugfit.step.memory_errors import memory_cause
from snugfit.step.plain_loop import Built, PlainStep
from snugfit.step.step import Observer
from snugfit.training.recovery import Exhausted

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup
    from snugfit.training.checkpoint.state import TrainState
    from snugfit.training.run.exchange import StepExchange


class StepRejected(SnugfitError):
    """Error that rejects a step after its forward and backward passes. No weight has changed."""

    name = "refused"
    """First part of the name of the file that lists the rejected step's samples."""

    option = ""
    """Name of the run's option that chooses between stopping and skipping the step."""

    def __init__(self, cause: str, loss: float, norm: float | None) -> None:
        super().__init__(f"{cause}. No weight was changed.")
        self.loss, self.norm = loss, norm

    def write(self, folder: Path, step: int, micro_batches: Sequence[Sequence[int]]) -> Path:
        """Write the indices of the samples of each micro-batch to a file. Return its path even if writing
        fails.
        """
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
    """Error that rejects a step with a NaN or infinite loss or gradient."""

    name, option = "nonfinite", "on_nonfinite"

    def __init__(self, loss: float, norm: float | None) -> None:
        of_norm = "A gradient is not a number" if norm is None else f"The gradients' norm is {norm}"
        super().__init__(of_norm if math.isfinite(loss) else f"The loss is {loss}", loss, norm)


class WeightsNonFinite(SnugfitError):
    """Error: an update has used gradients with NaN or infinity, so the weights are wrong."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The mean loss of one optimizer step, and a flag that is True if it updated the weights."""

    loss: float
    """Mean loss over the global batch."""

    updated: bool
    """True if the step changed the weights. False after a gradient scaler overflow or a rejected step."""


class PhaseTracker(Observer):
    """An observer that stores the current phase of a step, for error messages."""

    def __init__(self) -> None:
        self.now = "build"

    def phase(self, name: str) -> None:
        """Set the current phase of the step, for error messages."""
        self.now = name


def _nothing() -> None:
    """Do nothing: the default callback of a training step."""


class TrainingStep(PlainStep):
    """Runs optimizer steps of one job and Setup over micro-batches that the caller provides."""

    def __init__(
        self, job: Job, setup: Setup, device: torch.device, exchange: StepExchange | None = None
    ) -> None:
        # If the plain loop did not keep losses, it would have no sum to pass to `computed`.
        super().__init__(job, setup, device, keep_losses=True)
        self._exchange = exchange
        self.idle: Sequence[bool] = ()
        """One flag per micro-batch. True means that its loss does not count, and that it only keeps this
        process in step with others."""
        self.phases = PhaseTracker()
        self._check = FiniteCheck(device)
        self.computed = self._record_loss
        self._asked_of_loss: Callable[[], Any] = _nothing
        """Function that is called once the copy of a loss to the host has started, before the backward pass.
        """
        self._unchecked = False
        self._taken = 0
        self.unread = False
        """True if the host has not read the last step's gradient norm yet (`read_norm` does)."""
        self.sync_before_update = device.type != "cuda"
        """True if each update of the weights waits until all gradients have been checked.

        On the CPU this needs no waiting. The exception is updates within the passes, for which a check of all
        gradients takes extra passes.
        """
        self.norm: float | None = None
        """Global L2 norm of the gradients before clipping, in the last step whose norm was read. None for a
        job without clipping."""
        self.rejects: Callable[[float], StepRejected | None] = lambda loss: None
        """Function that is called with a step's loss before the update. It returns the error that rejects the
        step, or None."""
        self.device_was_busy = False
        """True if the device still computed the last step when the host had finished its own work."""

    def start_runner(self) -> None:
        """Run the following steps with a `StepRunner` (such as CUDA graphs), if the Setup has one. An update
        in the backward pass waits only for the norm of gradient clipping.
        """
        super().start_runner()
        if self.runner is not None and self.runner.updates_at_once(bool(self.job.clip)):
            self.sync_before_update = False

    def attempt(
        self,
        state: TrainState,
        micro_batches: Sequence[dict[str, Any]],
        meanwhile: Callable[[], None] = _nothing,
    ) -> StepResult | Exhausted:
        """Take a training step; return `Exhausted` in place of an out-of-memory error.

        An exception is not passed on, because its traceback would keep the step's tensors alive.
        """
        exhausted = None
        try:
            return self.take(state, micro_batches, meanwhile)
        except Exception as error:
            cause = memory_cause(error)
            if cause is None:
                raise
            has_begun = self.runner is not None and self.runner.has_begun
            # A runner may update weights within the backward pass, which `phases` does not show.
            phase = "update" if has_begun else self.phases.now
            exhausted = Exhausted(cause=cause, phase=phase, message=str(error))
        # The exception has been freed here, and with it the tensors that its stack frames referred to.
        state.optimizer.zero_grad(set_to_none=True)
        return exhausted

    def take(
        self,
        state: TrainState,
        micro_batches: Sequence[dict[str, Any]],
        meanwhile: Callable[[], None] = _nothing,
    ) -> StepResult:
        """Take one optimizer step over these host micro-batches (B, ...).

        `meanwhile` is called during the device's backward pass, after the previous step's norm was read.

        Raises `StepRejected` and leaves every weight, state and generator of the update unchanged, without
        gradients. Raises `WeightsNonFinite` if an earlier update was wrong. Errors of torch pass through,
        such as those for exhausted memory.
        """
        optimizer, scaler = state.optimizer, state.scaler
        pieces = iter([list(micro_batches)])
        built = Built(state.model, state.runs or state.model, optimizer, scaler, pieces, self.phases)
        updates_at_once = self.runner is not None and self.runner.updates_at_once(self.needs_norm())
        self._asked_of_loss = partial(self._read_loss, state) if updates_at_once else _nothing
        total = self._accumulate(built)
        # A runner that updates within the backward pass has read the loss before it.
        loss = self._check.loss() if updates_at_once else self._read_loss(state, has_one=total is not None)
        updated = self._check_and_update(state, built, loss, meanwhile)
        if updated:
            state.scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        after_update(self.setup, built.runs, self._taken)
        self._taken += 1
        # The time from here to the next step counts as loading.
        self.phases.phase("load")
        return StepResult(loss=loss, updated=updated)

    def _read_loss(self, state: TrainState, *, has_one: bool = True) -> float:
        """Return the loss of a step whose forward and backward passes are launched. Raises `StepRejected` for
        an invalid loss.
        """
        self.phases.phase("clip")
        # The previous step's norm is read here, where the host waits for the loss in any case.
        self.read_norm(state)
        loss = self._check.loss() if has_one else math.nan
        if self._exchange is not None:
            loss = self._exchange.loss(loss)
        if not math.isfinite(loss):
            state.optimizer.zero_grad(set_to_none=True)
            # If a weight is NaN, an earlier update was wrong, and not this step.
            self.check_weights(state)
            raise NonFinite(loss, None)
        if (rejection := self.rejects(loss)) is not None:
            state.optimizer.zero_grad(set_to_none=True)
            raise rejection
        return loss

    def needs_norm(self) -> bool:
        """Return True if a step must compute the gradients' norm: for clipping, or as a check before each
        update.
        """
        return super().needs_norm() or self.sync_before_update

    def reads_gradients(self) -> bool:
        """Return True if an update needs the values of the gradients on the host, and not only their norm."""
        # With clipping, all gradients are finite if their norm is.
        return self.sync_before_update and not self.job.clip

    def _check_and_update(
        self, state: TrainState, built: Built, loss: float, meanwhile: Callable[[], None]
    ) -> bool:
        """Check a step with a finite loss and update; return True if there was an update. Raises
        `NonFinite`."""
        scaler = state.scaler
        # Frozen weights, and weights that this batch did not use, have no gradient.
        trained = [weight for weight in state.parameters if weight.grad is not None]
        norm = None if self.runner is None else self.runner.norm
        norm = self._norm_of(trained, state) if norm is None else norm
        self._check.record_norm(norm)
        # The host fetches the next batch here, while the device computes.
        meanwhile()
        # If the device has finished, it waits for the host, so loading data delays the step.
        self.device_was_busy = not self._check.is_done()
        self.unread = norm is not None and bool(self.job.clip)
        if self.sync_before_update and scaler is None:
            self._raise_if_non_finite(state, trained, loss, has_norm=norm is not None)
        elif self.sync_before_update:
            self.read_norm(state)
        # These gradients are not checked here. `check_weights` detects NaN before the weights are used.
        self._unchecked = not self.sync_before_update and norm is None and scaler is None
        if self.runner is not None:
            self.runner.update(built, norm)
            return True
        return self._update(state, trained, norm)

    def _weights_of(self, pieces: Sequence[Mapping[str, Any]]) -> Sequence[float | None]:
        """Return the factors of the micro-batches' losses: each one's fraction of the counted labels of all
        processes. If no label of a micro-batch counts, its labels are overwritten: a mean over no labels is
        NaN, even times 0.
        """
        if self._exchange is None or not self._exchange.ranks.are_many:
            return super()._weights_of(pieces)
        idle = self.idle or [False] * len(pieces)
        items = [0 if skipped else self.items_of(piece) for piece, skipped in zip(pieces, idle, strict=True)]
        for piece, share in zip(pieces, items, strict=True):
            if not share and "labels" in piece and not piece["labels"].is_floating_point():
                # torch's cross entropy ignores the label -100. Labels clamped to 0 count, so that their mean
                # is not NaN.
                piece["labels"].clamp_(min=0)
        return self._exchange.weights(pieces, items)

    def _record_loss(self, total: torch.Tensor) -> None:
        self._check.record_loss(total)
        # On the CPU, the backward pass and its gradient exchange have ended before `loss` runs.
        if self._exchange is not None and self.device.type == "cpu":
            self._exchange.forward_ends()
        self._asked_of_loss()

    def read_norm(self, state: TrainState) -> None:
        """Read the last step's gradient norm from the device, unless it was read before.

        Raises `WeightsNonFinite` if it is not finite: the update has then made NaN weights.
        """
        if self.unread:
            self.unread, self.norm = False, self._check.norm()
            # The gradient scaler omits an update if the norm is infinite, so the weights are unchanged.
            if state.scaler is None and not math.isfinite(self.norm):
                raise WeightsNonFinite

    def check_weights(self, state: TrainState) -> None:
        """Check the weights before they are saved or used elsewhere.

        It reads the last gradient norm, or checks the weights themselves if the norm was not computed. Raises
        `WeightsNonFinite`.
        """
        self.read_norm(state)
        if self._unchecked:
            self._unchecked = False
            sound = all_finite(weight for weight in state.parameters if weight.requires_grad)
            if not self._holds_in_all_stages(sound):
                raise WeightsNonFinite

    def _holds_in_all_stages(self, condition: bool) -> bool:
        """Return True if `condition` holds in all processes of a pipeline.

        Without a pipeline every process has the same result.
        """
        if self.passes is None or self._exchange is None:
            return condition
        return not self._exchange.ranks.sum([float(not condition)])[0]

    def _norm_of(self, trained: list[torch.nn.Parameter], state: TrainState) -> torch.Tensor | None:
        if not self.job.clip:
            return None
        if state.scaler is not None:
            # Gradients are unscaled first, since the norm would be larger by the scaler's factor.
            state.scaler.unscale_(state.optimizer)
        if self.passes is not None:
            return self.passes.norm_of_all(trained)
        return tensor_parts().whole(gradient_norm(state.optimizer, trained))

    def _raise_if_non_finite(
        self, state: TrainState, trained: list[torch.nn.Parameter], loss: float, *, has_norm: bool
    ) -> None:
        """Raise `NonFinite` if gradients contain NaN or infinity; this waits until the device has computed
        them, or their norm.
        """
        self.unread, length = False, self._check.norm() if has_norm else None
        # Without clipping, this norm only serves the check, and is not logged.
        self.norm = length if self.job.clip else None
        gradients = (weight.grad for weight in trained if weight.grad is not None)
        sound = all_finite(gradients) if length is None else math.isfinite(length)
        sound = self._holds_in_all_stages(sound)
        if not sound:
            state.optimizer.zero_grad(set_to_none=True)
            raise NonFinite(loss, self.norm)

    def _update(
        self, state: TrainState, trained: list[torch.nn.Parameter], norm: torch.Tensor | None
    ) -> bool:
        """Clip by `norm` and update the weights. Return False if the gradient scaler skipped the update after
        an overflow.
        """
        if norm is not None:
            scale(trained, self.job.clip or 0.0, norm, state.optimizer)
        self.phases.phase("update")
        optimizer, scaler = state.optimizer, state.scaler
        if scaler is None:
            optimizer.step()
            return True
        steps: list[bool] = []
        # `GradScaler.step` returns None if it updates and if it skips, so a hook detects the optimizer's
        # call.
        hook = optimizer.register_step_post_hook(lambda *_: steps.append(True))
        try:
            scaler.step(optimizer)
        finally:
            hook.remove()
        scaler.update()
        return bool(steps)


# ---- checks of loss and gradients -------------------------------------------------------------------------


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if no tensor contains NaN or infinity; waits for the device."""
    # The largest absolute value is NaN or infinite if any value is. It needs only one reduction.
    parts = tensor_parts()
    largest = parts.whole(parts.total_norm(tensors, norm_type=float("inf")))
    return bool(largest.isfinite().item())


class FiniteCheck:
    """Copies the loss and gradient norm of each step to the host, without waiting for the device where
    possible.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        cuda = device.type == "cuda"
        # Copies to page-locked memory do not block the host.
        self._norm = torch.zeros((), dtype=torch.float32, pin_memory=cuda)
        self._loss = torch.zeros((), dtype=torch.float32, pin_memory=cuda)
        self._loss_known = torch.cuda.Event() if cuda else None
        self._gradients_known = torch.cuda.Event() if cuda else None

    def record_loss(self, loss: torch.Tensor) -> None:
        """Record the step's loss, a scalar on the device, before the backward pass, to read it later."""
        self._loss.copy_(loss.float(), non_blocking=True)
        if self._loss_known is not None:
            self._loss_known.record()

    def loss(self) -> float:
        """Return the step's loss; wait for the forward pass alone."""
        if self._loss_known is not None:
            self._loss_known.synchronize()
        return self._loss.item()

    def record_norm(self, norm: torch.Tensor | None) -> None:
        """Record the gradients' norm, a scalar on the device, if there is one, after the backward pass's
        launch."""
        if norm is not None:
            self._norm.copy_(norm.float(), non_blocking=True)
        if self._gradients_known is not None:
            self._gradients_known.record()

    def is_done(self) -> bool:
        """Return True if the device has finished the backward pass."""
        return self._gradients_known is None or bool(self._gradients_known.query())

    def norm(self) -> float:
        """Return the recorded gradient norm; wait for the device to compute it."""
        if self._gradients_known is not None:
            self._gradients_known.synchronize()
        return self._norm.item()
