"""Default technique: products of 32-bit matrices in full 32-bit precision, as in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.technique import PlainTechnique


@dataclass(frozen=True, kw_only=True)
class Ieee(PlainTechnique):
    """Multiplies 32-bit matrices with all 24 significant bits."""

    source: ClassVar = "torch.backends.cuda.matmul.fp32_precision = 'ieee'"
    elsewhere: ClassVar = ("highest",)
    counterparts: ClassVar = (Counterpart(arguments={"tf32": False}), Counterpart(arguments={"tf32": None}))
