"""Technique of TF32: tensor cores read 32-bit inputs with 11 significant bits and accumulate in 32 bits.
Memory does not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class Tf32(Technique):
    """Multiplies 32-bit matrices on tensor cores, reading 11 of their 24 significant bits."""

    fidelity: ClassVar = Fidelity.ROUNDS
    value: ClassVar = "tf32"
    source: ClassVar = (
        "NVIDIA A100 architecture whitepaper; torch.backends.cuda.matmul.fp32_precision = 'tf32'"
    )
    elsewhere: ClassVar = ("allow_tf32",)
    least_capability: ClassVar = (8, 0)
    counterparts: ClassVar = (Counterpart(arguments={"tf32": True}),)
