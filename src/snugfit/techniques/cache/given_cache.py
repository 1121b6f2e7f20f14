"""Default technique: the cache of keys and values that the job names, by default transformers'
`DynamicCache`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.technique import PlainTechnique


@dataclass(frozen=True, kw_only=True)
class GivenCache(PlainTechnique):
    """Stores keys and values of earlier tokens in the type of cache that the job names."""

    source: ClassVar = "transformers.GenerationConfig(cache_implementation=...)"
