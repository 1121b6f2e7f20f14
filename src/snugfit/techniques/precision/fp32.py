"""Everything in 32 bits: weights are cast up when they are loaded; activations, gradients and states follow.

It has no effect on weights that are loaded in 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Technique

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class Fp32(Technique):
    """Casts weights to 32 bits, and so activations, gradients and states."""

    fidelity: ClassVar = Fidelity.ROUNDS
    source: ClassVar = "from_pretrained(dtype=torch.float32)"
    elsewhere: ClassVar = ("float32", "float", "single", "32-true")
    counterparts: ClassVar = (Counterpart(arguments={"bf16": False, "fp16": False}),)

    def install(self, setup: Setup) -> Setup:
        """Set the Setup to create the weights in 32 bits and to use no autocast."""
        return setup.with_precision(weights="float32")

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Return the reason why no plan chooses weights in fp32. They are loaded in fp32 already, or would
        take twice the memory.
        """
        if job.dtype == "float32":
            return "the weights are already loaded in float32, so it changes nothing"
        return f"it is more exact than the weights as loaded, {job.dtype}, and needs twice their memory"
