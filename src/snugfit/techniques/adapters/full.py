"""Default technique without adapters: every weight trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.technique import PlainTechnique


@dataclass(frozen=True, kw_only=True)
class Full(PlainTechnique):
    """Trains every weight of the model."""

    source: ClassVar = "torch: parameters of an nn.Module require gradients by default"
    counterparts: ClassVar = (Counterpart(arguments={"lora.r": None}),)
