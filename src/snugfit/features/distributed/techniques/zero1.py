"""ZeRO's first stage by torch: as `ddp`, with the optimizer's states sharded over the GPUs.

Each GPU updates a part of the weights, whole tensors of them, and sends them to the others. It is torch's
`ZeroRedundancyOptimizer` and not DeepSpeed's first stage. A rank of it runs torch's own code alone, and its
predicted bytes agree with two H200s to the last one. DeepSpeed's stage would keep flat copies of weights and
gradients in addition. `zero2` and `zero3` are DeepSpeed's. `fsdp` saves more than this technique.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snugfit.features.distributed.fields import ParallelWish
from snugfit.features.distributed.techniques import several_gpus
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class Zero1(Technique):
    """Each of several GPUs holds the model and a part of the optimizer's states."""

    fidelity: ClassVar = Fidelity.SAME
    source: ClassVar = "Rajbhandari et al., ZeRO, arXiv 1910.02054; torch's ZeroRedundancyOptimizer"
    elsewhere: ClassVar = ("zero_redundancy_optimizer", "deepspeed_zero1", "deepspeed_stage1")
    needs_several_gpus: ClassVar = True

    bucket_views: bool = False
    """True if gradients are views of the averaged buckets, without memory of their own, as for `ddp`."""

    def install(self, setup: Setup) -> Setup:
        """Wrap the model in DDP, and shard the optimizer."""
        return several_gpus.with_parallel(setup, self._wish())

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield the settings that are not simulated on several GPUs."""
        yield from several_gpus.objections(job, recipe, self._wish())

    def _wish(self) -> ParallelWish:
        return ParallelWish(weights="copied", states="sharded", bucket_views=self.bucket_views)
