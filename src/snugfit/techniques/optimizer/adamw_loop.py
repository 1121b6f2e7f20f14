"""AdamW for one parameter after the other: the same optimizer states, temporary tensors of one parameter, and
many small kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.setup import Call, OptimizerWish, Setup
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class AdamWLoop(Technique):
    """AdamW that updates one parameter after the other."""

    fidelity: ClassVar = Fidelity.SAME
    family: ClassVar = "adamw"
    source: ClassVar = (
        "Loshchilov and Hutter, arXiv 1711.05101; torch.optim.AdamW(foreach=False, fused=False)"
    )
    elsewhere: ClassVar = ("adamw_for_loop", "adamw_single_tensor")

    def install(self, setup: Setup) -> Setup:
        """Set torch's AdamW without foreach as the optimizer of the Setup; its kernels run parameter by
        parameter.
        """
        factory = Call(path="torch.optim:AdamW", arguments={"foreach": False, "fused": False})
        return setup.with_adamw(OptimizerWish(factory=factory))
