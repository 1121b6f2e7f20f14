"""torch's caching allocator as it comes: segments of fixed size, taken when a block fits in none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class Default(Technique):
    """Lets torch's allocator take segments of fixed size."""

    fidelity: ClassVar = Fidelity.SAME
    plain: ClassVar = True
    source: ClassVar = "torch's c10/cuda/CUDACachingAllocator.cpp"
    counterparts: ClassVar = (Counterpart(arguments={}),)

    def install(self, setup: Setup) -> Setup:
        """Leave the allocator as torch configures it."""
        return setup.with_fields(expandable_segments=False)
