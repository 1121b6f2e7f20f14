"""ZeRO's third stage by DeepSpeed: weights too stay outside of the GPU until a module computes with them.

With one GPU they stay on the host. They are copied over the link for the forward pass and again for the
backward pass, module by module. So the GPU holds those of a few modules and their activations. It trains the
largest model on a GPU, and is the slowest. accelerate and the Trainer also build the model in this way
(`deepspeed.zero.Init`). The plain loop moves it to the GPU whole, and its weights go to the host from there.
Each of several GPUs keeps a part of everything, on the host or with `offload=none` itself, and gathers
weights. snugfit's own loop trains with it, except with `offload=nvme` (`engine/optimizer.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from snugfit.features.distributed.techniques import deepspeed_zero

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class Zero3(deepspeed_zero.EngineTechnique):
    """DeepSpeed's ZeRO-3: weights, states and the update on the host, a disk, or spread over GPUs."""

    source: ClassVar = "Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857; deepspeed.runtime.zero.stage3"
    elsewhere: ClassVar = ("zero_infinity", "deepspeed_zero3", "deepspeed_stage3")
    counterparts: ClassVar = deepspeed_zero.counterparts(3)
    last_resort: ClassVar = "zero3"
    zero_stage: ClassVar = 3

    offload: Literal["cpu", "optimizer", "nvme", "none"] = "cpu"
    """Place of weights, optimizer states and the update: `cpu` is the host, `nvme` a disk (the folder for
    temporary files), `none` the GPU. `optimizer` leaves the weights on the GPU. The host reads the disk's
    files part by part to update.
    """

    def warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        """Yield a warning about the accuracy of predictions, as measured in a few cases."""
        yield from super().warnings(job, compute_capability)
        if self.offload == "nvme":
            yield deepspeed_zero.OF_DISKS
