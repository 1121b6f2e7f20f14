"""Technique `bf16_master`: weights, activations and gradients in bfloat16, with updates in 32 bits but
without a second copy of the weights in fp32.

A trained weight is the bfloat16 nearest to its master (the weight in fp32). The optimizer stores the
difference in 16 bits, so that both halves together are the exact fp32 number (`masters/halves.py`). Small
updates are therefore not lost, as with `bf16`. There is no autocast that casts weights, as with `bf16_pure`.
An element takes 14 bytes: weight 2, gradient 2, lower half 2, and AdamW's moments 8. `bf16` takes 16 with
fp32 weights, and 2 more for autocast's copies. With `adamw_compact(master_bits=24)` the difference has 8
bits, and weights are rounded stochastically.

Next to adapters, the frozen weights are bfloat16 without a lower half. Adapters, which peft creates in fp32,
are split in two halves, so that matrix products with them are in 16 bits. Files saved by peft contain only
the bfloat16 halves.

The results differ from those of `bf16` in the same way as with `bf16_pure`. Normalisations, softmax and sums
of layers are computed in bfloat16, unless the model's own code casts them to fp32. Gradients are bfloat16
too. Autograd sums those of several micro-batches in bfloat16, and rounds each sum to 8 significant bits. With
many micro-batches, the gradient is less exact than the fp32 gradients of `bf16`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snugfit.features.engine.fields import ADDED, ALL
from snugfit.features.engine.master_optimizers import keeps_masters
from snugfit.techniques import roster
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot
from snugfit.techniques.wish import used_wishes

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class Bf16Master(Technique):
    """Keeps weights and gradients in bfloat16; the optimizer stores the weights' remaining bits for fp32
    updates.
    """

    fidelity: ClassVar = Fidelity.ROUNDS
    keeps_small_updates: ClassVar = True
    source: ClassVar = (
        "Micikevicius et al., arXiv 1710.03740, section 3.1, on masters; a weight and 16 bits as one: "
        "FlashOptim, arXiv 2602.23349"
    )
    elsewhere: ClassVar = ("bf16_master_weights", "bf16_split", "split_master")

    def install(self, setup: Setup) -> Setup:
        """Set fields of the Setup: weights split in two halves, no autocast, and an optimizer that updates
        both.
        """
        # The slot of adapters precedes this one, so the Setup contains their fields already.
        adds = any(wish.freezes for wish in used_wishes(setup))
        return setup.with_precision(weights="bfloat16").with_fields(masters=ADDED if adds else ALL)

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield reasons to refuse a recipe: evaluation, adapters, several processes, or an optimizer that
        cannot update master weights.
        """
        if not job.trains:
            yield "an evaluation updates nothing, so there are no 32-bit master weights. Try 'bf16_pure'."
        elif not keeps_masters(recipe[Slot.OPTIMIZER].install(self.alone)):
            yield (
                f"{recipe[Slot.OPTIMIZER]} does not update master weights in two halves. Try 'adamw', "
                "'adamw_fused' or 'adamw_compact', or 'bf16' with this optimizer."
            )
        if any(recipe[slot] != roster.plain(slot) for slot in roster.slots_of_several_gpus()):
            yield "weights in two halves are not supported in several processes. Try 'bf16'."

    def planned_without(self, job: Job, recipe: TechniqueBySlot) -> str:
        """Return why plans do not combine `bf16_master` with compiled layers or another optimizer than AdamW;
        empty if they do.
        """
        # No compiled step with this optimizer was measured.
        engine = recipe[Slot.ENGINE]
        if engine.alone.lowering is not None:
            return f"never measured with {engine} (--keep '{self} + {engine}' plans with both)"
        # The same kernel updates the weights for each named variant of AdamW.
        optimizer, default = recipe[Slot.OPTIMIZER], roster.plain(Slot.OPTIMIZER)
        if optimizer == default or optimizer.install(self.alone) != default.install(self.alone):
            return ""
        return f"it has an update of its own, the same with {optimizer} as with {default}"

    def warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        """Yield warnings: a GPU without bfloat16, few measured models, and micro-batch gradients added up in
        bfloat16.
        """
        if compute_capability and compute_capability < (8, 0):
            yield "this GPU does not support bfloat16 and emulates it slowly. Try 'fp16'."
        yield (
            "its steps were measured on H200s: requested bytes were exact. Recorded steps of "
            "BERT-large, RoBERTa-large, GPT-2 and a ViT took within 6 % of the predicted seconds. "
            "Those of Llama-3.2-1B took 8 to 11 % longer, at the GPU's power limit, which lowers its "
            "clock. Gradients of micro-batches are added up in bfloat16. snugfit measure shows yours."
        )
