"""Every weight trains: nothing is added and nothing is frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class Full(Technique):
    """Trains every weight of the model."""

    fidelity: ClassVar = Fidelity.SAME
    plain: ClassVar = True
    source: ClassVar = "torch: parameters of an nn.Module require gradients by default"
    counterparts: ClassVar = (Counterpart(arguments={"lora.r": None}),)

    def install(self, setup: Setup) -> Setup:
        """Change nothing: training every weight is the default."""
        return setup
