"""Before a step's update: is the loss a number, is every gradient, and what is their norm?

The loss is known when the forward pass is done. It is copied to page-locked memory behind it, and while the
device is at the backward pass the host reads it and waits for nothing.

The gradients are known at the end of the backward pass. To wait for that leaves the device with nothing to
do until the host has asked for the update: with such a loop BERT-large at 4 x 512 in fp32 took an H200 5.7 %
longer than the bare loop, all else that it does included. To check them without waiting still reads and
writes all of them once more: 1.6 % in tf32. So on a device neither is done, unless somebody asks for it
(`sync_before_update`; train-overhead-waiting.json, -looking.json and, as it is now, train-overhead.json under
results/h200-2026-11-22):

    the job clips        the norm is taken anyway; it is read one step later
    a scaler is there    it checks itself, and leaves out what overflows
    neither              a gradient that is no number makes weights that are none, these make the next loss
                         none, and before weights are kept or used elsewhere they are checked

A run whose update turns out to have been wrong is resumed from where it was right (`session.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from snugfit.step.wishes.mesh.spread_tensors import total_norm, whole

if TYPE_CHECKING:
    import torch


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether none of them holds a NaN or an infinity; waits for the device."""
    largest = whole(total_norm(tensors, norm_type=float("inf")))
    return bool(largest.isfinite().item())


class FiniteCheck:
    """Loss and norm of one step after the other, brought to the host without waiting for more than they
    need."""

    def __init__(self, device: torch.device) -> None:
        import torch

        cuda = device.type == "cuda"
        self._norm = torch.zeros((), dtype=torch.float32, pin_memory=cuda)
        self._loss = torch.zeros((), dtype=torch.float32, pin_memory=cuda)
        self._loss_known = torch.cuda.Event() if cuda else None
        self._gradients_known = torch.cuda.Event() if cuda else None

    def record_loss(self, loss: torch.Tensor) -> None:
        """The step's loss, a scalar on the device, before the backward pass."""
        self._loss.copy_(loss.float(), non_blocking=True)
        if self._loss_known is not None:
            self._loss_known.record()

    def loss(self) -> float:
        """The step's loss; waits for the forward pass alone."""
        if self._loss_known is not None:
            self._loss_known.synchronize()
        return self._loss.item()

    def record_norm(self, norm: torch.Tensor | None) -> None:
        """The gradients are launched, and this scalar on the device will be their norm, if one is taken."""
        if norm is not None:
            self._norm.copy_(norm.float(), non_blocking=True)
        if self._gradients_known is not None:
            self._gradients_known.record()

    def is_done(self) -> bool:
        """Whether the device has all the gradients."""
        return self._gradients_known is None or bool(self._gradients_known.query())

    def norm(self) -> float:
        """The norm that was recorded; waits for it."""
        if self._gradients_known is not None:
            self._gradients_known.synchronize()
        return self._norm.item()
