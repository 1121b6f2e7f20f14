"""ZeRO's second stage by DeepSpeed: gradients and optimizer states in flat partitions, optionally on the
host.

One GPU has no other to share them with, so there it only helps with `offload=cpu` (ZeRO-Offload). The GPU
keeps the weights in the dtype of the computation, and a bucket of gradients. Gradients go to the host while
the backward pass runs; there the CPU updates fp32 weights, and the new ones come back. Each of several GPUs
keeps and updates its part, on the GPU with `offload=none`. Each also keeps all weights in the dtype of the
computation. snugfit's own loop trains with it, on one GPU as on several (`engine/optimizer.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from snugfit.features.distributed.fields import ShardingWish
from snugfit.features.distributed.techniques import deepspeed_zero
from snugfit.techniques.setting import between
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class Zero2(Technique):
    """DeepSpeed's ZeRO-2: optimizer states, fp32 weights and the update on the host, or spread over GPUs."""

    fidelity: ClassVar = Fidelity.ROUNDS
    needs: ClassVar = deepspeed_zero.NEEDS
    extra: ClassVar = "deepspeed"
    unplanned: ClassVar = f"plans leave it out. {deepspeed_zero.TREE}"
    caveat: ClassVar = deepspeed_zero.UNCERTAIN
    source: ClassVar = "Ren et al., ZeRO-Offload, arXiv 2101.06840; deepspeed.runtime.zero.stage_1_and_2"
    elsewhere: ClassVar = ("zero_offload", "deepspeed_zero2", "deepspeed_stage2")
    counterparts: ClassVar = deepspeed_zero.counterparts(2)
    last_resort: ClassVar = "zero2"
    searched: ClassVar = False

    offload: Literal["cpu", "none"] = "cpu"
    """Place of optimizer states and the update: `cpu` is the host, `none` the GPU, which alone needs more
    than without DeepSpeed.
    """

    bucket: int | None = between(1, deepspeed_zero.LARGEST_BUCKET, default=None)
    """Number of elements of the buffer in which gradients are averaged (`reduce_bucket_size`). The
    default is the square of the model's width, as for `auto`; DeepSpeed's own is 500000000.
    """

    def install(self, setup: Setup) -> Setup:
        """Set the Setup's `sharding` field, so that DeepSpeed's engine runs the steps."""
        return deepspeed_zero.with_engine(
            setup, ShardingWish(stage=2, states=self.offload, bucket=self.bucket)
        )

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield reasons to refuse a recipe: the engine supports only AdamW in fp32 or bf16."""
        yield from deepspeed_zero.objections(job, recipe, on_host=self.offload == "cpu")
