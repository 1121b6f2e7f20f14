"""All gradients exist together when the backward pass ends; the optimizer's step then reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.technique import PlainTechnique


@dataclass(frozen=True, kw_only=True)
class AllGradients(PlainTechnique):
    """Keeps the gradients of all weights until the optimizer's step has read them."""

    source: ClassVar = "torch.Tensor.backward, then torch.optim.Optimizer.step"
