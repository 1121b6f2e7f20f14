"""ZeRO's first stage by torch: as `ddp`, with the optimizer's states sharded over the GPUs.

Each GPU updates a part of the weights, whole tensors of them, and sends them to the others. It is torch's
`ZeroRedundancyOptimizer` and not DeepSpeed's first stage. A rank of it runs torch's own code alone, and its
predicted bytes agree with two H200s to the last one. DeepSpeed's stage would keep flat copies of weights and
gradients in addition. `zero2` and `zero3` are DeepSpeed's. `fsdp` saves more than this technique.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.features.distributed.fields import ParallelWish
from snugfit.features.distributed.techniques import several_gpus
from snugfit.techniques.technique import Fidelity


@dataclass(frozen=True, kw_only=True)
class Zero1(several_gpus.SharedBatch):
    """Keeps a copy of the model on each of several GPUs, and shards only the optimizer states over them."""

    fidelity: ClassVar = Fidelity.SAME
    source: ClassVar = "Rajbhandari et al., ZeRO, arXiv 1910.02054; torch's ZeroRedundancyOptimizer"
    elsewhere: ClassVar = ("zero_redundancy_optimizer", "deepspeed_zero1", "deepspeed_stage1")

    bucket_views: bool = False
    """True if gradients are views of the averaged buckets, without memory of their own, as for `ddp`."""

    def wish(self) -> ParallelWish:
        """Return the distribution over processes (field `parallel`): weights copied, optimizer states
        sharded.
        """
        return ParallelWish(weights="copied", states="sharded", bucket_views=self.bucket_views)
