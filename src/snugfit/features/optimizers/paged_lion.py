"""Lion of bitsandbytes with its moment in managed memory, which the driver moves between host and GPU.

The state is that of Lion, in 32 bits or in 8 (`lion`, `lion_8bit`). `paged_adamw.py` describes its location
and the cost that is not predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.features.optimizers.small_states import LION, PagedStates, lion_counterparts
from snugfit.techniques.setup import OptimizerWish
from snugfit.techniques.technique import Fidelity


@dataclass(frozen=True, kw_only=True)
class PagedLion(PagedStates):
    """Lion with its moment in CUDA managed memory, which moves to the host when the GPU is full."""

    fidelity: ClassVar = Fidelity.LEARNS
    source: ClassVar = (
        "Chen et al., arXiv 2302.06675; Dettmers et al., arXiv 2305.14314; bitsandbytes.optim.PagedLion"
    )
    elsewhere: ClassVar = ("paged_lion_32bit",)
    advice: ClassVar = {"paged_lion_8bit": "write 'paged_lion(bits=8)'."}
    counterparts: ClassVar = (
        *lion_counterparts("paged_lion_32bit", {"bits": 32}),
        *lion_counterparts("paged_lion_8bit", {"bits": 8}),
    )

    @property
    def value(self) -> OptimizerWish:
        """Return bitsandbytes' paged Lion as the optimizer of the Setup."""
        return self.paged_wish("Lion", LION)
