"""torch's caching allocator as it comes: segments of fixed size, taken when a block fits in none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class Default(Technique):
    """Lets torch's allocator take segments of fixed size."""

    fidelity: ClassVar = Fidelity.SAME
    plain: ClassVar = True
    value: ClassVar = False
    source: ClassVar = "torch's c10/cuda/CUDACachingAllocator.cpp"
    counterparts: ClassVar = (Counterpart(arguments={}),)
