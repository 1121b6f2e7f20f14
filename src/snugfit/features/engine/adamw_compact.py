"""snugfit's own AdamW with both moments in 8 bits, in groups of 64 that share a scale, rounded
stochastically.

The optimizer states take 2.125 bytes per element: 2 for the moments, and 8 per group for the scales. AdamW's
take 8. With weights of `bf16_master`, the lower half of each fp32 weight takes 2 more. An element then takes
8.125 bytes in all, with weight and gradient. With `adamw_fused` and `bf16` it takes 16, and autocast's
copies. On a GPU one kernel, which also clips, moves 14.25 bytes per element; `bf16_master` with fp32 moments
moves 26. All arithmetic is in fp32; `masters/compact.py` describes the storage of moments.

With `master_bits=24` the lower half takes 1 byte, and an element 7.125 bytes in all. With `released`
gradients it takes 5.125, and an update moves 12.25. After each update in fp32, a weight is rounded
stochastically to one of its two 24-bit neighbours. Small updates are therefore not lost, but add up on
average (`masters/halves.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from snugfit.features.engine.fields import MASTERS
from snugfit.features.engine.master_optimizers import compact_adamw
from snugfit.techniques import roster
from snugfit.techniques.setup import OptimizerWish
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot, setup_of

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class AdamWCompact(Technique):
    """AdamW with both moments in 8 bits, rounded stochastically, in one kernel: a quarter of
    AdamW's state.
    """

    fidelity: ClassVar = Fidelity.ROUNDS
    source: ClassVar = (
        "moments in 8 bits with a scale for each block: Dettmers et al., arXiv 2110.02861. Moments of "
        "weights in two halves: FlashOptim, arXiv 2602.23349. Kernels and codes are our own"
    )
    elsewhere: ClassVar = ("compact_adamw", "flash_adamw")

    master_bits: Literal[32, 24] = 32
    """Bits of each fp32 weight of `bf16_master`: 24 are rounded stochastically, and take 1 byte beside
    bfloat16, not 2.
    """

    @property
    def value(self) -> OptimizerWish:
        """Return the setting that builds snugfit's own AdamW (`CompactAdamW`). The HF Trainer has no name for
        it.
        """
        return compact_adamw(self.master_bits)

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield reasons to refuse a recipe: several GPUs, or weights that are neither fp32 nor split in two
        halves.
        """
        slots = Slot.ADAPTERS, Slot.PRECISION, *roster.slots_of_several_gpus()
        # During a search the last slots (groups of techniques) may be empty. Reading them first stops at
        # once.
        setup = setup_of(*reversed([recipe[slot] for slot in reversed(slots)]))
        dtype = setup.trained_dtype(job) if job.trains else "float32"
        if dtype != "float32" and not MASTERS.of(setup):
            yield (
                f"the weights that train are {dtype} and have no 32-bit masters, and it updates "
                f"masters or weights "
                "in fp32. Add 'bf16_master' or 'bf16', or take 'adamw_8bit'."
            )
        elif self.master_bits != 32 and not MASTERS.of(setup):
            yield (
                "weights that train are fp32 and have no masters that could have "
                f"{self.master_bits} bits. Add 'bf16_master', or take 'adamw_compact' as it is."
            )
        # The kernel needs all weights and states in one process, so techniques for several GPUs are excluded.
        if any(recipe[slot] != roster.plain(slot) for slot in roster.slots_of_several_gpus()):
            yield "its states are not supported in several processes. Try 'adamw_8bit' or 'adamw_fused'."

    def warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        """Yield a warning that its losses were compared with those of AdamW in few runs only."""
        yield (
            "its training was compared with AdamW's only in short runs (dev/log.md): 5,000 steps of a "
            "GPT-2 on a made language, and 300 of BERT-large. Compare it on your own data before a "
            "long run."
        )
