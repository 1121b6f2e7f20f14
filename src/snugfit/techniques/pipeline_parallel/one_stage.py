"""One stage: each GPU runs all layers of the model, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class OneStage(Technique):
    """Keeps all layers of the model on one GPU."""

    fidelity: ClassVar = Fidelity.SAME
    plain: ClassVar = True
    source: ClassVar = "torch's eager mode"
    counterparts: ClassVar = (Counterpart(arguments={}),)

    def install(self, setup: Setup) -> Setup:
        """Leave all layers on one GPU."""
        return setup
