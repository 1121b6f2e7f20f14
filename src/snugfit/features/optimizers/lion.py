"""Lion of bitsandbytes: the update is the sign of a momentum, so one 32-bit moment is the whole state.

State: 4 bytes an element, half of AdamW's, and no temporaries. Every element moves by the learning rate
itself. So the learning rate should be a tenth to a third of AdamW's (Chen et al., section 5). The weight
decay should be larger by the same factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.features.optimizers.small_states import (
    LION,
    LION_RATE,
    BitsandbytesOptimizer,
    bitsandbytes_wish,
    lion_counterparts,
)
from snugfit.techniques.technique import Fidelity


@dataclass(frozen=True, kw_only=True)
class Lion(BitsandbytesOptimizer):
    """Optimizer that updates weights by the sign of a momentum: one 32-bit moment, half of AdamW's state."""

    fidelity: ClassVar = Fidelity.LEARNS
    unplanned: ClassVar = LION_RATE
    value: ClassVar = bitsandbytes_wish("Lion", "lion_32bit", LION)
    source: ClassVar = "Chen et al., arXiv 2302.06675; bitsandbytes.optim.Lion"
    elsewhere: ClassVar = ("lion_32bit", "lion32bit")
    counterparts: ClassVar = lion_counterparts("lion_32bit", {})
