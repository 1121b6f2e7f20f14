"""Optimizer steps of DeepSpeed's engine, in the order and with the checks of `loop.py`.

The engine owns the backward pass and the update. Gradients go into its partitions as they come, averaged over
the processes. Its step computes their norm, changes nothing if the norm is not finite, clips and updates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from snugfit.step.plain_loop import Built
from snugfit.training.run.loop import NonFinite, TrainingStep

if TYPE_CHECKING:
    import torch

    from snugfit.training.checkpoint.state import TrainState


class EngineTrainingStep(TrainingStep):
    """Training steps whose backward pass and update DeepSpeed's engine runs (`Built.runs`)."""

    def backward(self, built: Built, loss: torch.Tensor, *, is_last: bool) -> None:
        """Run the backward pass of a micro-batch in the engine."""
        optimizer: Any = built.optimizer
        optimizer.backward(loss, is_last=is_last)

    def _check_and_update(
        self, state: TrainState, built: Built, loss: float, meanwhile: Callable[[], None]
    ) -> bool:
        optimizer: Any = state.optimizer
        # There is no norm before the engine's step, so this check only covers the loss.
        self._check.record_norm(None)
        meanwhile()
        self.device_was_busy = not self._check.is_done()
        self.phases.phase("update")
        optimizer.step()
        # Reading the norm waits for the device, so it is read only if it is used.
        norm = optimizer.norm() if self.job.clip or optimizer.overflowed else None
        if optimizer.overflowed:
            # The engine has updated nothing, so the weights are still those before the step.
            self.norm = norm if self.job.clip else None
            raise NonFinite(loss, self.norm)
        self.norm = norm
        return True
