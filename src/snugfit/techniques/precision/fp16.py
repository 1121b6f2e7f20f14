"""Mixed precision with float16: weights, gradients and states as loaded, in 32 bits; products in 16.

float16 reaches down to 6e-8 only. So the loss is scaled up before the backward pass and the gradients down
after it. Steps whose gradients overflow are skipped and the scale halves (Micikevicius et al., section 3.2).
Trained weights must be fp32: torch's scaler takes no gradients of 16 bits ("Attempting to unscale FP16
gradients").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snugfit.job.dtype import LOST_BELOW
from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot, setup_of

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class Fp16(Technique):
    """Computes products in float16 under autocast, with scaled gradients; weights stay as loaded."""

    fidelity: ClassVar = Fidelity.ROUNDS
    source: ClassVar = "Micikevicius et al., arXiv 1710.03740; torch.autocast and torch.amp.GradScaler"
    elsewhere: ClassVar = ("float16", "half", "amp", "fp16_mixed", "16-mixed", "amp_fp16")
    counterparts: ClassVar = (Counterpart(arguments={"bf16": False, "fp16": True}),)

    def install(self, setup: Setup) -> Setup:
        """Set the Setup to run forward and loss under float16 autocast, with a gradient scaler around the
        update.
        """
        # float16 reaches down to 6e-8 only, so small gradients need a scaled loss.
        return setup.with_precision(products="float16", is_scaled=True)

    def is_never_better_than(self, other: Technique, compute_capability: tuple[int, int] | None) -> bool:
        """Return True if `other` is `bf16` and the GPU multiplies bfloat16 at float16's rate. `bf16` needs no
        gradient scaler.
        """
        # From Ampere on, both have the same speed, and bfloat16 needs no gradient scaler.
        return other.name == "bf16" and compute_capability is not None and compute_capability >= (8, 0)

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Return the reason why no plan chooses autocast in a job that only evaluates 16-bit weights; empty
        for other jobs.
        """
        if job.dtype in LOST_BELOW and not job.trains:
            return f"the weights are loaded in {job.dtype}, so it only adds conversions (--dtype float16)"
        return ""

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield an objection to trained weights of 16 bits: the scaler takes 32-bit gradients only."""
        # Adapters may train in fp32 on 16-bit weights, which the scaler accepts.
        adapted = setup_of(self, recipe[Slot.ADAPTERS])
        if job.trains and (dtype := adapted.trained_dtype(job)) in LOST_BELOW:
            yield (
                f"the weights are loaded in {dtype}, but its gradient scaler takes only fp32 gradients "
                '(torch: "Attempting to unscale FP16 gradients"). Load them in float32 (dtype: float32, '
                "--dtype float32), train adapters (which are fp32), or try 'bf16'."
            )
