"""AdamW of bitsandbytes: both moments in 8 bits, in blocks of 256 that share one scale.

State of a parameter of 4,096 elements or more: 2 bytes an element and 8 bytes a block. That is 2.03 bytes an
element, against AdamW's 8. `embeddings=32` stores the moments of embedding tables in 32 bits, as the HF
Trainer does. `updates/bitsandbytes_states.py` gives the reasons and the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.features.optimizers.small_states import EightBitStates, bitsandbytes_wish
from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import OptimizerWish
from snugfit.techniques.technique import Fidelity


@dataclass(frozen=True, kw_only=True)
class AdamW8bit(EightBitStates):
    """AdamW with both moments in 8 bits, block by block: a quarter of the state."""

    fidelity: ClassVar = Fidelity.ROUNDS
    source: ClassVar = "Dettmers et al., arXiv 2110.02861; bitsandbytes.optim.AdamW8bit"
    elsewhere: ClassVar = (
        "adamw_bnb_8bit",
        "adamw_bnb",
        "adam8bit",
        "adamw8bit",
        "adam_8bit",
        "8bit_adam",
        "8bit_adamw",
    )
    counterparts: ClassVar = (
        Counterpart(arguments={"optim": "adamw_bnb_8bit"}),
        Counterpart(arguments={"optim": "adamw_8bit"}),
    )

    @property
    def value(self) -> OptimizerWish:
        """Return bitsandbytes' 8-bit AdamW as the optimizer of the Setup."""
        return bitsandbytes_wish("AdamW8bit", "adamw_bnb_8bit", {}, self.embeddings)
