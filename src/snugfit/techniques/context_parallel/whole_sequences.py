"""Default technique without context parallelism: each GPU computes its samples alone."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit.techniques.technique import PlainTechnique


@dataclass(frozen=True, kw_only=True)
class WholeSequences(PlainTechnique):
    """Leaves each sequence on one GPU."""
