"""No sharding: the loop trains the model itself, and the GPU holds all that trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class Unsharded(Technique):
    """Leaves weights, gradients and states on the GPU, without DeepSpeed."""

    fidelity: ClassVar = Fidelity.SAME
    plain: ClassVar = True
    source: ClassVar = "torch's eager mode"
    counterparts: ClassVar = (Counterpart(arguments={}),)

    def install(self, setup: Setup) -> Setup:
        """Leave the model without an engine."""
        return setup
