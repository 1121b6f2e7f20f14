"""Lion of bitsandbytes with its one moment in 8 bits, in blocks of 256 that share one scale.

State of a parameter of 4,096 elements or more: a byte an element and 4 bytes a block. That is 1.02 bytes an
element, against AdamW's 8 and Lion's 4. `embeddings=32` stores the moment of embedding tables in 32 bits.
`updates/bitsandbytes_states.py` describes the rest. The learning rate is Lion's, not AdamW's (`lion.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.features.optimizers.small_states import (
    LION,
    LION_RATE,
    EightBitStates,
    bitsandbytes_wish,
    lion_counterparts,
)
from snugfit.techniques.setup import OptimizerWish
from snugfit.techniques.technique import Fidelity


@dataclass(frozen=True, kw_only=True)
class Lion8bit(EightBitStates):
    """Lion with its moment in 8 bits, block by block: an eighth of AdamW's state."""

    fidelity: ClassVar = Fidelity.LEARNS
    unplanned: ClassVar = LION_RATE
    source: ClassVar = (
        "Chen et al., arXiv 2302.06675; Dettmers et al., arXiv 2110.02861; bitsandbytes' Lion8bit"
    )
    elsewhere: ClassVar = ("lion8bit",)
    counterparts: ClassVar = lion_counterparts("lion_8bit", {})

    @property
    def value(self) -> OptimizerWish:
        """Return bitsandbytes' 8-bit Lion as the optimizer of the Setup."""
        return bitsandbytes_wish("Lion8bit", "lion_8bit", LION, self.embeddings)
