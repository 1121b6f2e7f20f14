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
from snugfit.techniques.technique import Fidelity

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class Ddp(several_gpus.SharedBatch):
    """Keeps a copy of the model on each of several GPUs, which share the batch and average gradients."""

    fidelity: ClassVar = Fidelity.SAME
    source: ClassVar = "Li et al., PyTorch Distributed, arXiv 2006.15704; torch.nn.parallel"
    elsewhere: ClassVar = ("data_parallel", "distributed_data_parallel")
    counterparts: ClassVar = several_gpus.COPIED

    bucket_views: bool = False
    """True if gradients are views of the averaged buckets, without memory of their own
    (`gradient_as_bucket_view`).
    """

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield the variant of DDP that plans use: gradients are views of the buckets, which saves a second
        copy.
        """
        yield cls(bucket_views=True)

    def wish(self) -> ParallelWish:
        """Return the distribution over processes (field `parallel`): weights copied to all GPUs."""
        return ParallelWish(weights="copied", bucket_views=self.bucket_views)
