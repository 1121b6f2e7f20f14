"""AdamW in one fused kernel per list of parameters: the same optimizer states as plain AdamW, and no
temporary tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Call, OptimizerWish, Setup
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class AdamWFused(Technique):
    """AdamW in fused kernels, without temporaries."""

    fidelity: ClassVar = Fidelity.SAME
    family: ClassVar = "adamw"
    source: ClassVar = "Loshchilov and Hutter, arXiv 1711.05101; torch.optim.AdamW(fused=True)"
    elsewhere: ClassVar = ("adamw_torch_fused", "fused_adam", "fused_adamw")
    counterparts: ClassVar = (Counterpart(arguments={"optim": "adamw_torch_fused"}),)

    def install(self, setup: Setup) -> Setup:
        """Set torch's AdamW with fused kernels as the optimizer of the Setup."""
        factory = Call(path="torch.optim:AdamW", arguments={"fused": True})
        return setup.with_adamw(OptimizerWish(factory=factory, trainer_name="adamw_torch_fused"))
