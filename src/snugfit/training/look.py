"""A look at a step before its update: is the loss a number, is every gradient, and how long are they?

What is asked is computed on the device, behind the backward pass, and copied to page-locked memory; `begin`
waits for nothing. Whatever the host can do meanwhile it does, and `end` then waits for what is left of the
backward pass. That wait is what a look costs: after it the device has nothing to do until the host has asked
for the update.

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

    loss: float
    """Of the step, mean over the global batch."""

    gradients_are_numbers: bool
    """Whether none of them is NaN or infinite."""

    norm: float | None
    """Their global L2 norm; None where nothing is clipped."""


class Look:
    """One look after the other, at the steps of a run."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device, cuda = device, device.type == "cuda"
        self._seen = torch.zeros(3, dtype=torch.float32, pin_memory=cuda)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._event = torch.cuda.Event() if cuda else None

    def begin(
        self,
        loss: torch.Tensor,
        parameters: Sequence[torch.nn.Parameter],
        *,
        clips: bool,
        overflows: Sequence[torch.Tensor] | None,
    ) -> torch.Tensor | None:
        """Asks for loss, gradients and, where the job `clips`, their norm, which is given (on the device).
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
        self._seen.copy_(torch.stack([loss.float(), bad, shown]), non_blocking=True)
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
        loss, bad, norm = self._seen.tolist()
        sound = not bad and (not clips or math.isfinite(norm))
        return Seen(loss=loss, gradients_are_numbers=sound, norm=norm if clips else None)
