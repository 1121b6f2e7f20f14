"""Default technique without pipeline parallelism: each GPU runs all layers of the model."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit.techniques.technique import PlainTechnique


@dataclass(frozen=True, kw_only=True)
class OneStage(PlainTechnique):
    """Keeps all layers of the model on one GPU."""
