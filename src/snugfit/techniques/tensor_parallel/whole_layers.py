"""Default technique without tensor parallelism: each GPU computes layers by itself, with whole matrices."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit.techniques.technique import PlainTechnique


@dataclass(frozen=True, kw_only=True)
class WholeLayers(PlainTechnique):
    """Has each GPU compute layers by itself, with whole matrices."""
