"""Mixed precision with float16: weights, gradients and states in 32 bits, products in 16.

float16 reaches down to 6e-8 only, so the loss is scaled up before the backward pass and the gradients down
after it; steps whose gradients overflow are skipped and the scale halves (Micikevicius et al., section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class Fp16(Technique):
    """Computes products in float16 under autocast, with scaled gradients; weights stay in 32 bits."""

    fidelity: ClassVar = Fidelity.ROUNDS
    source: ClassVar = "Micikevicius et al., arXiv 1710.03740; torch.autocast and torch.amp.GradScaler"
    elsewhere: ClassVar = ("float16", "half", "amp", "fp16_mixed", "16-mixed", "amp_fp16")
    counterparts: ClassVar = (Counterpart(arguments={"bf16": False, "fp16": True, "model.dtype": "float32"}),)

    def install(self, setup: Setup) -> Setup:
        """Runs forward pass and loss under autocast, with a gradient scaler around the update."""
        return replace(setup, weights_dtype="float32", autocast="float16", scale_gradients=True)
