"""Default technique without expert parallelism: each GPU has all experts of each layer."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit.techniques.technique import PlainTechnique


@dataclass(frozen=True, kw_only=True)
class AllExperts(PlainTechnique):
    """Has each GPU compute with all experts of each layer."""
