"""ZeRO's second stage by DeepSpeed: gradients and optimizer states in flat partitions, optionally on the
host.

One GPU has no other to share them with, so there it only helps with `offload=cpu` (ZeRO-Offload). The GPU
keeps the weights in the dtype of the computation, and a bucket of gradients. Gradients go to the host while
the backward pass runs; there the CPU updates fp32 weights, and the new ones come back. Each of several GPUs
keeps and updates its part, on the GPU with `offload=none`. Each also keeps all weights in the dtype of the
computation. snugfit's own loop trains with it, on one GPU as on several (`engine/optimizer.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from snugfit.features.distributed.techniques import deepspeed_zero


@dataclass(frozen=True, kw_only=True)
class Zero2(deepspeed_zero.EngineTechnique):
    """DeepSpeed's ZeRO-2: optimizer states, fp32 weights and the update on the host, or spread over GPUs."""

    source: ClassVar = "Ren et al., ZeRO-Offload, arXiv 2101.06840; deepspeed.runtime.zero.stage_1_and_2"
    elsewhere: ClassVar = ("zero_offload", "deepspeed_zero2", "deepspeed_stage2")
    counterparts: ClassVar = deepspeed_zero.counterparts(2)
    last_resort: ClassVar = "zero2"
    zero_stage: ClassVar = 2

    offload: Literal["cpu", "none"] = "cpu"
    """Place of optimizer states and the update: `cpu` is the host, `none` the GPU, which alone needs more
    than without DeepSpeed.
    """
