"""AdamW for bfloat16 weights with stochastic rounding, so that small updates are not lost.

State: two moments in 16 bits, 4 bytes an element, and no copy of the weights in 32 bits. With weights and
gradients that is 8 bytes, where AdamW in 32 bits has 16. The update is computed in 32 bits, some millions of
numbers at a time. It takes a few times as long as `adamw_fused`. `updates/stochastic.py` describes the
rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snugfit.techniques.setup import Call, OptimizerWish
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot, setup_of

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class AdamWStochastic(Technique):
    """AdamW for bfloat16 weights with stochastic rounding, so that small updates are not lost."""

    single_weight_updates: ClassVar = True
    fidelity: ClassVar = Fidelity.ROUNDS
    keeps_small_updates: ClassVar = True
    unplanned: ClassVar = (
        "it changes the training result of bfloat16 weights, which is not predicted, so no plan "
        "chooses it by itself"
    )
    caveat: ClassVar = (
        "the seconds of its update follow from the bytes it moves. One step was measured, BERT-large on "
        "an H100: the bytes as predicted, and 63.7 ms where 52.8 are predicted. snugfit measure shows yours."
    )
    # transformers' Trainer has no name for this optimizer.
    value: ClassVar = OptimizerWish(
        factory=Call(path="snugfit.features.optimizers.updates.stochastic:StochasticAdamW")
    )
    source: ClassVar = (
        "Zamirai et al., arXiv 2010.06192; torch.optim.AdamW(fused=True) on copies in 32 bits. torchao's "
        "_AdamW(bf16_stochastic_round=True) rounds the weights so, and its moments to the nearest"
    )
    elsewhere: ClassVar = ("bf16_stochastic", "bf16_stochastic_round", "stochastic_rounding")

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield an objection if weights have 32 bits, because fp32 weights are not rounded."""
        setup = setup_of(recipe[Slot.PRECISION], recipe[Slot.ADAPTERS])
        if job.trains and (dtype := setup.trained_dtype(job)) != "bfloat16":
            yield (
                f"the weights that train are {dtype}, and it rounds weights of bfloat16 only. Add "
                "'bf16_pure' to train all weights in bfloat16 (--dtype bfloat16 loads them so), or take "
                "'adamw_fused'."
            )
