"""Checks before a step's update: a finite loss, finite gradients, and their norm.

The loss is known after the forward pass. It is copied to page-locked memory next, and the host reads it
during the device's backward pass, without any wait.

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

from collections.abc import Iterable
from typing import TYPE_CHECKING

from snugfit.step.spread_tensors import total_norm, whole

if TYPE_CHECKING:
    import torch


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if no tensor has a NaN or an infinity; waits for the device."""
    largest = whole(total_norm(tensors, norm_type=float("inf")))
    return bool(largest.isfinite().item())


class FiniteCheck:
    """The loss and norm of each step, copied to the host with as little waiting as possible."""

    def __init__(self, device: torch.device) -> None:
        import torch

        cuda = device.type == "cuda"
        self._norm = torch.zeros((), dtype=torch.float32, pin_memory=cuda)
        self._loss = torch.zeros((), dtype=torch.float32, pin_memory=cuda)
        self._loss_known = torch.cuda.Event() if cuda else None
        self._gradients_known = torch.cuda.Event() if cuda else None

    def record_loss(self, loss: torch.Tensor) -> None:
        """Record the step's loss, a scalar on the device, before the backward pass."""
        self._loss.copy_(loss.float(), non_blocking=True)
        if self._loss_known is not None:
            self._loss_known.record()

    def loss(self) -> float:
        """Return the step's loss; waits for the forward pass alone."""
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
        """Return True if the device has computed all gradients."""
        return self._gradients_known is None or bool(self._gradients_known.query())

    def norm(self) -> float:
        """Return the recorded norm; waits for it."""
        if self._gradients_known is not None:
            self._gradients_known.synchronize()
        return self._norm.item()
