"""No tensor parallelism: each GPU computes layers by itself, with whole matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class WholeLayers(Technique):
    """Has each GPU compute layers by itself, with whole matrices."""

    fidelity: ClassVar = Fidelity.SAME
    plain: ClassVar = True
    source: ClassVar = "torch's eager mode"
    counterparts: ClassVar = (Counterpart(arguments={}),)

    def install(self, setup: Setup) -> Setup:
        """Leave the model as it is."""
        return setup
