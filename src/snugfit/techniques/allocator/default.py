"""Default technique: torch's caching allocator, which maps a new segment of fixed size for a block that fits
in no free one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.technique import PlainTechnique


@dataclass(frozen=True, kw_only=True)
class Default(PlainTechnique):
    """Lets torch's allocator take segments of fixed size."""

    source: ClassVar = "torch's c10/cuda/CUDACachingAllocator.cpp"
