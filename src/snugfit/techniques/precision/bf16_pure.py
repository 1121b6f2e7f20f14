"""Everything in bfloat16: weights, activations, gradients and optimizer states, half of fp32 throughout.

bfloat16 has 8 significant bits, so an update below about 1/256 of a weight is lost in the addition. Small
learning rates stall where fp32 weights would move. The model learns, but by another algorithm. The optimizer
`adamw_stochastic` rounds so that none is lost on average.
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
class Bf16Pure(Technique):
    """Keeps weights, activations, gradients and states in bfloat16."""

    fidelity: ClassVar = Fidelity.LEARNS
    source: ClassVar = "torch.nn.Module.to(torch.bfloat16); Zamirai et al., arXiv 2010.06192, on its limits"
    elsewhere: ClassVar = ("bf16_true", "bf16-true", "pure_bf16", "bf16_full")
    counterparts: ClassVar = (Counterpart(arguments={"bf16": False, "fp16": False}),)

    def install(self, setup: Setup) -> Setup:
        """Set the Setup to create the weights in bfloat16 and to use no autocast."""
        return setup.with_precision(weights="bfloat16")

    @classmethod
    def fidelity_for(cls, job: Job) -> Fidelity:
        """Return `ROUNDS` for a job without training, since no small update can be lost."""
        return cls.fidelity if job.trains else Fidelity.ROUNDS

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Return the reason why no plan chooses weights in bfloat16: the loaded weights are in bfloat16
        already. Empty for other weights.
        """
        if job.dtype == "bfloat16":
            return "the weights are already loaded in bfloat16, so it changes nothing"
        return ""

    def warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        """Yield a warning for a GPU before Ampere, which emulates bfloat16."""
        if compute_capability and compute_capability < (8, 0):
            yield "this GPU does not support bfloat16 and emulates it slowly. Try 'fp16'."
