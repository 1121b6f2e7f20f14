"""The stack is cut into k segments; each keeps its input and is computed again as a whole.

With L like layers and k segments, k inputs and the L/k layers of one segment are alive at once: k + L/k is
least at k = sqrt(L) (Chen et al., arXiv 1604.06174, section 4.1), counted in layers' outputs. Real layers
keep far more inside than their output, so every_layer often takes less; both cost one forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from snugfit.techniques.setting import between
from snugfit.techniques.setup import CheckpointWish, Setup
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class Segments(Technique):
    """Cuts the layers into k segments, keeps each one's input, and computes it again as a whole."""

    fidelity: ClassVar = Fidelity.SAME
    source: ClassVar = "Chen et al., arXiv 1604.06174; torch.utils.checkpoint.checkpoint_sequential"
    elsewhere: ClassVar = ("checkpoint_sequential",)

    k: int | None = between(1, 10_000, default=None)
    """Segments per stack of layers; by default the square root of its length, rounded."""

    def install(self, setup: Setup) -> Setup:
        """Spans by number."""
        return replace(setup, checkpoint=CheckpointWish(layers_per_span=0, spans=self.k))
