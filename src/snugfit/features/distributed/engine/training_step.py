"""Optimizer steps of DeepSpeed's engine, in the order and with the checks of `loop.py`.

The engine owns the backward pass and the update. Gradients go into its partitions as they come, averaged over
the processes. Its step computes their norm, changes nothing if the norm is not finite, clips and updates. The
check before an update therefore covers the loss alone. The engine reports a bad gradient after its step,
which then has updated nothing. It waits for the gradients itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from snugfit.step.batches import place
from snugfit.step.plain_loop import Built
from snugfit.training.run.loop import NonFinite, TrainingStep

if TYPE_CHECKING:
    import torch

    from snugfit.training.checkpoint.state import TrainState


class EngineTrainingStep(TrainingStep):
    """Steps of an engine, which is `Built.runs`."""

    def _accumulate(self, built: Built) -> torch.Tensor | None:
        optimizer: Any = built.optimizer
        built.observer.phase("load")
        pieces = next(built.batches)
        counted = [*zip(pieces, self._weights_of(pieces), strict=True)]
        if self._exchange is None or not self._exchange.ranks.are_many:  # the mean over nothing is NaN
            counted = [(piece, weight) for piece, weight in counted if weight != 0]
        total: torch.Tensor | None = None
        for number, (piece, weight) in enumerate(counted, 1):
            total = self._pass(built, piece, weight, total, is_last=number == len(counted), by=optimizer)
        return total

    def _pass(
        self,
        built: Built,
        piece: Mapping[str, Any],
        weight: float | None,
        before: torch.Tensor | None,
        *,
        is_last: bool,
        by: Any,
    ) -> torch.Tensor:
        """Run the forward and backward pass of a host micro-batch; return the sum of the step's losses so
        far."""
        built.observer.phase("load")
        batch = place(piece, self.device)
        built.observer.phase("forward")
        with self.forward_context():
            loss = self.loss_of(built.runs, batch)
        if weight is not None:
            loss = loss * weight
        total = loss.detach().float() if before is None else before + loss.detach()
        self.computed(total)
        built.observer.phase("backward")
        by.backward(loss, is_last=is_last)
        return total

    def _check_and_update(
        self, state: TrainState, built: Built, loss: float, meanwhile: Callable[[], None]
    ) -> bool:
        optimizer: Any = state.optimizer
        self._check.record_norm(None)
        meanwhile()
        self.device_was_busy = not self._check.is_done()
        self.phases.phase("update")
        optimizer.step()
        norm = optimizer.norm() if self.job.clip or optimizer.overflowed else None
        if optimizer.overflowed:
            self.norm = norm if self.job.clip else None
            raise NonFinite(loss, self.norm)
        self.norm = norm
        return True
