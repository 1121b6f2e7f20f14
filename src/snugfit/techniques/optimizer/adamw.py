"""AdamW as torch runs it by default on a GPU: all parameters at once, in lists (foreach).

State: two fp32 moments, 8 bytes an element of fp32 weights. The lists make few kernels, and one temporary as
large as all weights together (the square roots of the second moments). That temporary is the peak when
activations are few. torch selects foreach by itself on CUDA. The recipe sets it by name so that every device
does the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Call, OptimizerWish, Setup
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class AdamW(Technique):
    """AdamW over all parameters at once, as torch does it by default."""

    fidelity: ClassVar = Fidelity.SAME
    family: ClassVar = "adamw"
    plain: ClassVar = True
    source: ClassVar = "Loshchilov and Hutter, arXiv 1711.05101; torch.optim.AdamW(foreach=True)"
    elsewhere: ClassVar = ("adamw_torch", "adamw_hf", "adam", "adamw_foreach")
    counterparts: ClassVar = (Counterpart(arguments={"optim": "adamw_torch"}),)

    def install(self, setup: Setup) -> Setup:
        """Set torch's AdamW with foreach kernels as the optimizer of the Setup."""
        # torch chooses foreach by itself on CUDA; the name makes every device do the same.
        factory = Call(path="torch.optim:AdamW", arguments={"foreach": True})
        return setup.with_adamw(OptimizerWish(factory=factory, trainer_name="adamw_torch"))
