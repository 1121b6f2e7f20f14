"""Expert parallelism: of n GPUs that share each layer, each has an n-th of its experts, whole.

`tensor(n)` alone would cut each expert's matrices. With this technique attention and the rest are cut as by
`tensor(n)`, and experts are divided by their number. All n GPUs hold the same tokens. Each runs its own
experts on the tokens routed to them, and the parts are summed. No token is sent to another GPU, so only the
work can be unbalanced. The code is transformers' own (`base_model_ep_plan`), limited to the part that its
versions from 5.17 on share. Sending tokens between GPUs with other parts of the batch came in 5.21.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from snugfit.features.distributed.fields import PARALLEL
from snugfit.features.distributed.techniques import several_gpus, tensor_plans
from snugfit.techniques.setting import between
from snugfit.techniques.setup import Setup
from snugfit.techniques.several_gpus import MOST_GPUS
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job

HOW_MEASURED = (
    "Each GPU is taken to compute an even part of the tokens. One step was measured, on two H100s: its "
    "requested bytes were exact. snugfit measure --gpus shows yours."
)


@dataclass(frozen=True, kw_only=True)
class Expert(Technique):
    """Divides the experts of each layer over the n GPUs of `tensor(n)` (expert parallelism)."""

    fidelity: ClassVar = Fidelity.ROUNDS
    caveat: ClassVar = HOW_MEASURED
    source: ClassVar = "Lepikhin et al., GShard, arXiv 2006.16668; transformers' expert_parallel"
    elsewhere: ClassVar = ("expert_parallel", "ep")
    needs_several_gpus: ClassVar = True

    n: int = between(2, MOST_GPUS)
    """Number of GPUs that the experts of a layer are distributed over, as in `tensor(n)`."""

    def install(self, setup: Setup) -> Setup:
        """Set the Setup's `parallel` field to distribute experts over the GPUs that share layers."""
        return several_gpus.along(setup, experts=self.n)

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield reasons to refuse a recipe: no `tensor` on as many GPUs, or a model without experts."""
        wish = PARALLEL.of(recipe[Slot.TENSOR_PARALLEL].alone)
        if wish is None or wish.tensor != self.n:
            yield (
                f"experts are spread over the GPUs that share a layer, and {recipe[Slot.TENSOR_PARALLEL]} "
                f"makes no groups of {self.n}. Write 'tensor({self.n}) + expert({self.n})'."
            )
        yield from tensor_plans.objections_to_experts(job, self.n)

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield settings for groups of GPUs that fit into one host and divide the model's experts."""
        yield from (cls(n=n) for n in (2, 4, 8) if not any(tensor_plans.objections_to_experts(job, n)))

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Return the reason why no plan spreads experts over GPUs: no group within a host can share the
        experts. Empty if a group can.
        """
        if any(cls.settings(job)):
            return ""
        return next(tensor_plans.objections_to_experts(job, 2)).rstrip(".")
