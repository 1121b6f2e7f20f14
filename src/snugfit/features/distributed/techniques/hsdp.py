"""Hybrid sharding by torch's FSDP2: several copies of the model, each spread over a group of GPUs.

As `fsdp` within a group, which is best the GPUs of one host; gradients are then averaged over the groups.
Between hosts only those travel, once a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from snugfit.features.distributed.fields import ParallelWish
from snugfit.features.distributed.techniques import several_gpus
from snugfit.techniques.counterpart import Setting
from snugfit.techniques.setting import between
from snugfit.techniques.several_gpus import MOST_GPUS
from snugfit.techniques.technique import Fidelity

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class Hsdp(several_gpus.SharedBatch):
    """Shards the model over each group of n GPUs as `fsdp` does, and averages gradients over the groups."""

    fidelity: ClassVar = Fidelity.ROUNDS
    source: ClassVar = "Zhao et al., PyTorch FSDP, arXiv 2304.11277, section 3.2.2; fully_shard"
    elsewhere: ClassVar = ("hybrid_shard", "hybrid_sharded")
    counterparts: ClassVar = several_gpus.sharded_elsewhere(Setting("n"))

    n: int = between(2, MOST_GPUS)
    """Number of GPUs of a group, best within one host."""

    reshard: Literal["layers", "all", "none"] = "layers"
    """Gathered weights that are dropped after the forward pass, as for `fsdp`."""

    offload: Literal["none", "cpu"] = "none"
    """Place of the shards and of the update: `cpu` is the host (`CPUOffloadPolicy`), `none` the GPU. With
    `cpu`, weights are copied to the GPU whenever they are gathered.
    """

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield settings for groups of GPUs that fit into one host."""
        yield from (cls(n=n) for n in (2, 4, 8))

    def wish(self) -> ParallelWish:
        """Return the distribution over processes (field `parallel`): copies of the weights, each sharded over
        n GPUs.
        """
        return ParallelWish(
            weights="sharded", shards=self.n, reshard=self.reshard, on_host=self.offload == "cpu"
        )
