"""Everything in 32 bits: weights, activations, gradients and states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class Fp32(Technique):
    """Keeps weights, activations, gradients and states in 32 bits."""

    fidelity: ClassVar = Fidelity.SAME
    plain: ClassVar = True
    source: ClassVar = "torch's default dtype"
    elsewhere: ClassVar = ("float32", "float", "single", "32-true")
    counterparts: ClassVar = (
        Counterpart(arguments={"bf16": False, "fp16": False, "model.dtype": "float32"}),
    )

    def install(self, setup: Setup) -> Setup:
        """Creates the weights in 32 bits and uses no autocast."""
        return replace(setup, weights_dtype="float32", autocast=None, scale_gradients=False)
