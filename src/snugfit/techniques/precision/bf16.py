"""Mixed precision with bfloat16: weights, gradients and states as loaded, products in 16 bits.

bfloat16 has the exponent of fp32, so no value underflows and no gradient is scaled. With 32-bit weights
autocast keeps a 16-bit copy of each through the forward pass. So they cost 6 bytes an element there instead
of 4. With bfloat16 weights it changes little: normalisations, softmax and the loss are computed in 32 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Technique

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class Bf16(Technique):
    """Computes products in bfloat16 under autocast; weights and updates stay as loaded."""

    fidelity: ClassVar = Fidelity.ROUNDS
    source: ClassVar = "Kalamkar et al., arXiv 1905.12322; torch.autocast"
    elsewhere: ClassVar = ("bfloat16", "bf16_mixed", "bf16-mixed", "amp_bf16")
    counterparts: ClassVar = (Counterpart(arguments={"bf16": True, "fp16": False}),)

    def install(self, setup: Setup) -> Setup:
        """Set the Setup to run the forward pass and the loss under bfloat16 autocast."""
        # bfloat16 has the exponent of fp32, so no gradient underflows and none is scaled.
        return setup.with_precision(products="bfloat16")

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Return the reason why no plan chooses autocast in a job that only evaluates bfloat16 weights; empty
        for other jobs.
        """
        if job.dtype == "bfloat16" and not job.trains:
            return "the weights are loaded in bfloat16, so it only adds conversions"
        return ""

    def warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        """Yield a warning for a GPU before Ampere, which emulates bfloat16."""
        if compute_capability and compute_capability < (8, 0):
            yield "this GPU does not support bfloat16 and emulates it slowly. Try 'fp16', which it supports."
