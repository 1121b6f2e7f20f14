"""A look at a step before its update: is the loss a number, is every gradient, and how long are they?

The loss is known when the forward pass is done. It is copied to page-locked memory behind it, and while the
device is at the backward pass the host reads it and waits for nothing.

The gradients are known at the end of the backward pass. To wait for that leaves the device with nothing to
do until the host has asked for the update: with such a loop BERT-large at 4 x 512 in fp32 took an H200 5.7 %
longer than the bare loop, all else that it does beside included. To look through them without waiting still
reads and writes all of them once more: 1.6 % in tf32. So on a device neither is done, unless somebody asks to
be careful (train-overhead-waiting.json, -looking.json and, as it is now, train-overhead.json under
results/h200-2026-11-22):

    the job clips        the norm is taken anyway; it is read one step later
    a scaler is there    it looks itself, and leaves out what overflows
    neither              a gradient that is no number makes weights that are none, these make the next loss
                         none, and before weights are kept or used elsewhere they are looked through

A run whose update turns out to have been wrong is taken up again from where it was right (`session.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def all_numbers(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether none of them holds a NaN or an infinity; waits for the device."""
    import torch

    largest = torch.nn.utils.get_total_norm(tensors, norm_type=float("inf"))
    return bool(largest.isfinite().item())


class Look:
    """One look after the other, at the steps of a run."""

    def __init__(self, device: torch.device) -> None:
        import torch

        cuda = device.type == "cuda"
        self._norm = torch.zeros((), dtype=torch.float32, pin_memory=cuda)
        self._loss = torch.zeros((), dtype=torch.float32, pin_memory=cuda)
        self._computed = torch.cuda.Event() if cuda else None
        self._taken = torch.cuda.Event() if cuda else None

    def computed(self, loss: torch.Tensor) -> None:
        """What the step's losses come to; heard before the backward pass."""
        self._loss.copy_(loss.float(), non_blocking=True)
        if self._computed is not None:
            self._computed.record()

    def loss(self) -> float:
        """The step's loss; waits for the forward pass alone."""
        if self._computed is not None:
            self._computed.synchronize()
        return self._loss.item()

    def taken(self, norm: torch.Tensor | None) -> None:
        """The gradients are asked for, and this will be their norm where one is taken."""
        if norm is not None:
            self._norm.copy_(norm.float(), non_blocking=True)
        if self._taken is not None:
            self._taken.record()

    def is_done(self) -> bool:
        """Whether the device has all the gradients."""
        return self._taken is None or bool(self._taken.query())

    def norm(self) -> float:
        """The norm that `taken` heard of; waits for it."""
        if self._taken is not None:
            self._taken.synchronize()
        return self._norm.item()
