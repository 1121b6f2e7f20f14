"""Tensor parallelism: n GPUs compute each layer together, each with a part of its matrices.

Each has some heads of attention, some columns of the feed-forward block, and some of the vocabulary of
embedding and head. Then their results are summed. So each holds an n-th of nearly all weights, gradients and
states, and of the activations within a block. The price is an exchange in every layer, which no computation
overlaps. So n is best at most the GPUs of one host, with a link of their own. All GPUs hold the activations
between blocks, and the logits too.

The model's own plan (transformers' `base_model_tp_plan`) lists the cut matrices; torch's `parallelize_module`
cuts them. Without sharding, n GPUs train one copy of the model on the whole batch. With `fsdp`, `hsdp` or
`ddp` each such group has a part of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from snugfit.features.distributed.fields import PARALLEL, ParallelWish
from snugfit.features.distributed.techniques import several_gpus, tensor_plans
from snugfit.techniques.setting import between
from snugfit.techniques.setup import Setup
from snugfit.techniques.several_gpus import MOST_GPUS
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job


HOW_MEASURED = (
    "Five steps with it were measured, on two H100s: requested bytes were exact. The host's seconds of "
    "DTensor are fitted to four of them; the fifth took 11 % longer than forecast. Two more ran on "
    "four H200s, with fsdp and with pipeline(2), on a host that was not calibrated. Groups of more "
    "than two GPUs were not measured. snugfit measure --gpus shows yours."
)


@dataclass(frozen=True, kw_only=True)
class Tensor(Technique):
    """Divides each layer's matrices over n GPUs, which compute the layer together (tensor parallelism)."""

    fidelity: ClassVar = Fidelity.ROUNDS
    caveat: ClassVar = HOW_MEASURED
    source: ClassVar = "Shoeybi et al., Megatron-LM, arXiv 1909.08053; torch's parallelize_module"
    elsewhere: ClassVar = ("tensor_parallel", "tp")
    needs_several_gpus: ClassVar = True

    n: int = between(2, MOST_GPUS)
    """Number of GPUs of a group, best within one host."""

    def install(self, setup: Setup) -> Setup:
        """Set the Setup's `parallel` field to cut the model's matrices over the group."""
        return several_gpus.along(setup, tensor=self.n)

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield reasons to refuse a recipe: settings not simulated on several GPUs, or model sizes that n
        does not divide.
        """
        wish = PARALLEL.of(recipe[Slot.SHARDING].alone) or ParallelWish(weights="alone")
        yield from several_gpus.objections(job, recipe, replace(wish, tensor=self.n))
        spread = PARALLEL.of(recipe[Slot.EXPERT_PARALLEL].alone)
        yield from tensor_plans.objections(job, self.n, experts=spread is not None)

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield settings for groups of GPUs that fit into one host and divide the model's sizes."""
        for n in (2, 4, 8):
            # Some models can be split only if each expert stays whole.
            if any(not any(tensor_plans.objections(job, n, experts=spread)) for spread in (False, True)):
                yield cls(n=n)

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Return the reason why no plan cuts matrices over GPUs: no group within a host can share the model.
        Empty if a group can.
        """
        if any(cls.settings(job)):
            return ""
        return next(tensor_plans.objections(job, 2)).rstrip(".")
