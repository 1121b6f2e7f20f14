"""A look at a step before its update: is the loss a number, is every gradient, and how long are they?

The loss is known when the forward pass is done. It is copied to page-locked memory behind it, and while the
device is at the backward pass the host reads it and waits for nothing.

The gradients are known at the end of the backward pass. To wait for that leaves the device with nothing to
do until the host has asked for the update: with such a loop BERT-large at 4 x 512 in fp32 took an H200 5.7 %
longer than the bare loop, all else that it does beside included (train-overhead.json under results/). So the
host waits only where it has to: where a gradient scaler waits anyway, where the job
clips, and where somebody asked to be careful. Elsewhere the answer is read one step later, before the next
update and before anything is kept, and a run whose update turns out to have been wrong is taken up again
from where it was right (`session.py`).

The gradients' norm is taken where the job clips by it. Elsewhere they are only looked through, by the kernel
with which torch's GradScaler looks through scaled ones (`torch._amp_foreach_non_finite_check_and_unscale_`):
one launch for all of them, where a norm takes one for each and a sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What was seen."""

    gradients_are_numbers: bool
    """Whether none of them is NaN or infinite."""

    norm: float | None
    """Their global L2 norm; None where nothing is clipped."""


class Look:
    """One look after the other, at the steps of a run."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device, cuda = device, device.type == "cuda"
        self._seen = torch.zeros(2, dtype=torch.float32, pin_memory=cuda)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._loss = torch.zeros((), dtype=torch.float32, pin_memory=cuda)
        self._event = torch.cuda.Event() if cuda else None
        self._loss_event = torch.cuda.Event() if cuda else None

    def computed(self, loss: torch.Tensor) -> None:
        """What the step's losses come to; heard before the backward pass."""
        self._loss.copy_(loss.float(), non_blocking=True)
        if self._loss_event is not None:
            self._loss_event.record()

    def loss(self) -> float:
        """The step's loss; waits for the forward pass alone."""
        if self._loss_event is not None:
            self._loss_event.synchronize()
        return self._loss.item()

    def begin(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        clips: bool,
        overflows: Sequence[torch.Tensor] | None,
    ) -> torch.Tensor | None:
        """Asks about the gradients and, where the job `clips`, their norm, which is given (on the device).
        `overflows` is what a gradient scaler has found already, per device."""
        import torch

        gradients = [each.grad for each in parameters if each.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients) if clips else None
        if overflows is not None:
            bad = torch.stack([each.float() for each in overflows]).sum()
        elif norm is not None:
            bad = torch.zeros_like(self._one)  # the norm tells
        else:
            bad = self._looked_through(gradients)
        shown = bad if norm is None else norm.float()
        self._seen.copy_(torch.stack([bad, shown]), non_blocking=True)
        if self._event is not None:
            self._event.record()
        return norm

    def _looked_through(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        bad = torch.zeros_like(self._one)
        for dtype in {each.dtype for each in gradients}:
            alike = [each for each in gradients if each.dtype is dtype]
            torch._amp_foreach_non_finite_check_and_unscale_(alike, bad, self._one)  # by one: nothing changes
        return bad

    def is_done(self) -> bool:
        """Whether `end` would wait for nothing."""
        return self._event is None or bool(self._event.query())

    def end(self, *, clips: bool) -> Seen:
        """What was seen; waits for it."""
        if self._event is not None:
            self._event.synchronize()
        bad, norm = self._seen.tolist()
        sound = not bad and (not clips or math.isfinite(norm))
        return Seen(gradients_are_numbers=sound, norm=norm if clips else None)
