"""Data parallel training by torch's `DistributedDataParallel`: each GPU holds the whole model.

Each GPU takes its part of the global batch. While the backward pass runs, gradients are averaged over all
GPUs, bucket by bucket. It shortens steps, but does not help a model that is too large. A GPU holds as much as
a single one, and the buckets in addition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from snugfit.features.distributed.fields import ParallelWish
from snugfit.features.distributed.techniques import several_gpus
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class Ddp(Technique):
    """Each of several GPUs holds the model and takes a part of the batch; gradients are averaged."""

    fidelity: ClassVar = Fidelity.SAME
    source: ClassVar = "Li et al., PyTorch Distributed, arXiv 2006.15704; torch.nn.parallel"
    elsewhere: ClassVar = ("data_parallel", "distributed_data_parallel")
    counterparts: ClassVar = several_gpus.COPIED
    needs_several_gpus: ClassVar = True

    bucket_views: bool = False
    """True if gradients are views of the averaged buckets, without memory of their own
    (`gradient_as_bucket_view`).
    """

    def install(self, setup: Setup) -> Setup:
        """Wrap the model in DDP."""
        return several_gpus.with_parallel(setup, self._wish())

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield the settings that are not simulated on several GPUs."""
        yield from several_gpus.objections(job, recipe, self._wish())

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Without a second copy of the gradients, which nothing needs."""
        yield cls(bucket_views=True)

    def _wish(self) -> ParallelWish:
        return ParallelWish(weights="copied", bucket_views=self.bucket_views)
