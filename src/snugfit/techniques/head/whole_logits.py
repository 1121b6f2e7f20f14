"""The head gives the logits of all tokens, and the loss is computed from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class WholeLogits(Technique):
    """Computes the logits of all tokens, then their loss."""

    fidelity: ClassVar = Fidelity.SAME
    plain: ClassVar = True
    source: ClassVar = "torch.nn.functional.cross_entropy of the head's output"
    counterparts: ClassVar = (Counterpart(arguments={}),)

    def install(self, setup: Setup) -> Setup:
        """Leave head and loss to the model's own code."""
        return setup.with_fields(logits=None)
