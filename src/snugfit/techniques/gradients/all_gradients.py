"""Default technique: all gradients exist at the end of the backward pass, and the optimizer's step then reads
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.technique import PlainTechnique


@dataclass(frozen=True, kw_only=True)
class AllGradients(PlainTechnique):
    """Keeps the gradients of all weights until the optimizer's step has read them."""

    source: ClassVar = "torch.Tensor.backward, then torch.optim.Optimizer.step"
