"""torch's caching allocator as it comes: segments of fixed size, taken when a block fits in none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.technique import PlainTechnique


@dataclass(frozen=True, kw_only=True)
class Default(PlainTechnique):
    """Lets torch's allocator take segments of fixed size."""

    source: ClassVar = "torch's c10/cuda/CUDACachingAllocator.cpp"
