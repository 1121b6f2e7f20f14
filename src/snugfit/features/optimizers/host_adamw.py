"""AdamW on the host: both moments in its memory, and the update by its CPU.

The GPU stores weights and gradients and no states at all: 8 bytes a parameter less in fp32. Every step waits
for the host. Weights and gradients are copied there. The CPU reads and writes seven numbers for each weight.
Then the new weights are copied back. In a step of many micro-batches that is a small part of the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.setup import Call, OptimizerWish
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class HostAdamW(Technique):
    """AdamW with its moments in the host's memory, updated by the CPU."""

    single_weight_updates: ClassVar = True
    fidelity: ClassVar = Fidelity.SAME
    family: ClassVar = "adamw"
    unplanned: ClassVar = "plans leave it out, because it makes no step faster (--keep host_adamw allows it)"
    caveat: ClassVar = (
        "the seconds of its update are by hosts of one kind, whose eight threads updated 3.2e9 weights "
        "in a second in fp32 and 4.5e9 in bfloat16; with fewer threads or slower memory it takes longer. "
        "snugfit measure shows yours."
    )
    # transformers' Trainer has no name for this optimizer.
    value: ClassVar = OptimizerWish(factory=Call(path="snugfit.features.optimizers.updates.host:AdamWOnHost"))
    source: ClassVar = (
        "Ren et al., ZeRO-Offload, arXiv 2101.06840; torch.optim.AdamW(fused=True) on the CPU. torchao's "
        "CPUOffloadOptimizer copies while the CPU computes, and keeps weights and gradients on the host too"
    )
    advice: ClassVar = dict.fromkeys(
        ("cpu_offload", "offload_optimizer"),
        "that is an argument of DeepSpeed, which is 'zero2' or 'zero3' here. Without it, 'host_adamw' and "
        "'paged_adamw' keep optimizer states on the host, and 'host(all)' activations.",
    )
    elsewhere: ClassVar = ("host_states", "cpu_offload_optimizer", "cpu_adam", "deepspeed_cpu_adam")
