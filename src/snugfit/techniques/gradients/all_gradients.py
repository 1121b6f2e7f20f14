"""All gradients exist together when the backward pass ends; the optimizer's step then reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class AllGradients(Technique):
    """Keeps the gradients of all weights until the optimizer's step has read them."""

    fidelity: ClassVar = Fidelity.SAME
    plain: ClassVar = True
    source: ClassVar = "torch.Tensor.backward, then torch.optim.Optimizer.step"
    counterparts: ClassVar = (Counterpart(arguments={}),)

    def install(self, setup: Setup) -> Setup:
        """Set one optimizer step after the end of the backward pass."""
        return setup
