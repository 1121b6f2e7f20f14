"""Fully sharded data parallel training by torch's FSDP2: each GPU holds a part of everything.

Weights, gradients and optimizer states are sharded over all GPUs. Before a layer computes, its weights are
gathered, forward and again backward. Its gradients are summed and sharded at once. In addition a GPU holds
the weights of about two layers, and its own activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from snugfit.features.distributed.fields import ParallelWish
from snugfit.features.distributed.techniques import several_gpus
from snugfit.techniques.technique import Fidelity

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class Fsdp(several_gpus.SharedBatch):
    """Shards weights, gradients and optimizer states over GPUs, and gathers the weights of a layer to compute
    it.
    """

    fidelity: ClassVar = Fidelity.ROUNDS
    source: ClassVar = "Zhao et al., PyTorch FSDP, arXiv 2304.11277; torch.distributed.fsdp.fully_shard"
    elsewhere: ClassVar = ("fully_shard", "fsdp2", "full_shard")
    counterparts: ClassVar = several_gpus.sharded_elsewhere()

    reshard: Literal["layers", "all", "none"] = "layers"
    """Gathered weights that are dropped after the forward pass and gathered again for the backward one
    (`reshard_after_forward`): the `layers`' (FSDP2's default), `all`, or `none`.
    """

    offload: Literal["none", "cpu"] = "none"
    """Place of the shards and of the update: `cpu` is the host (`CPUOffloadPolicy`), `none` the GPU. With
    `cpu`, weights are copied to the GPU whenever they are gathered.
    """

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield settings: weights stay gathered until the backward pass, or are gathered twice."""
        yield from (cls(reshard="none"), cls())

    def wish(self) -> ParallelWish:
        """Return the distribution over processes (field `parallel`): weights sharded over all GPUs."""
        return ParallelWish(weights="sharded", reshard=self.reshard, on_host=self.offload == "cpu")
