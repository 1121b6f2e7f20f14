"""Training of one model on several GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snugfit.techniques.feature import Feature

if TYPE_CHECKING:
    from snugfit.planning.several_gpus.candidates import Spreading


class Distributed(Feature):
    """Spread a model over several GPUs."""

    def spreading(self) -> Spreading:
        """Return the ways of the techniques for several GPUs."""
        from snugfit.features.distributed.plan.ways import MeshSpreading

        return MeshSpreading()
