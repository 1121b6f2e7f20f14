"""Default technique without sharding: the loop trains the model itself, and the GPU has all trained weights
and states.
"""

from __future__ import annotations

from dataclasses import dataclass

from snugfit.techniques.technique import PlainTechnique


@dataclass(frozen=True, kw_only=True)
class Unsharded(PlainTechnique):
    """Leaves weights, gradients and states on the GPU, without DeepSpeed."""
