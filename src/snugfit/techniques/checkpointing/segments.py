"""Technique of activation checkpointing: the layers form k groups, each of which keeps its input and is
recomputed as a whole.

With L equal layers and k segments, k inputs and the L/k layers of one segment are alive at once. k + L/k is
least at k = sqrt(L) (Chen et al., arXiv 1604.06174, section 4.1), counted in layers' outputs. Real layers
keep far more inside than their output, so every_layer often takes less; both cost one forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snugfit.job.kv_prefix import dropped_prefix
from snugfit.techniques.setting import between
from snugfit.techniques.setup import CheckpointWish
from snugfit.techniques.technique import Fidelity, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job

SHARED_BIAS_MODELS = frozenset(
    {"t5", "mt5", "longt5", "switch_transformers", "udop", "pop2piano", "pix2struct", "wavlm"}
)
"""Model types whose first layer computes a position bias and passes it on with the hidden state."""


@dataclass(frozen=True, kw_only=True)
class Segments(Technique):
    """Cuts the layers into k segments, keeps each one's input, and computes it again as a whole."""

    fidelity: ClassVar = Fidelity.SAME
    source: ClassVar = "Chen et al., arXiv 1604.06174; torch.utils.checkpoint.checkpoint_sequential"
    elsewhere: ClassVar = ("checkpoint_sequential",)

    k: int | None = between(1, 10_000, default=None)
    """Number of segments in each stack of layers; by default the square root of its length, rounded."""

    @property
    def value(self) -> CheckpointWish:
        """Return the checkpointing setting for all layers in k segments, each recomputed as a whole."""
        return CheckpointWish(layers_per_span=0, spans=self.k)

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield objections to prefix tuning, whose keys and values would be dropped. Yield them too for
        models whose layers return more than the hidden state.
        """
        yield from dropped_prefix(job)
        # The layers of a segment are called together and pass on only the hidden state.
        if job.trains and job.model.architecture in SHARED_BIAS_MODELS:
            yield (
                f"the layers of {job.model.architecture} pass a position bias from one to the next, so "
                "they cannot be recomputed together. Try 'every_layer' or 'every_nth_layer(2)'."
            )
