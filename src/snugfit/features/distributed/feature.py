"""Training of one model on several GPUs, one process for each."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from snugfit.techniques.feature import Feature
from snugfit.techniques.several_gpus import ranks_of

if TYPE_CHECKING:
    from snugfit.planning.several_gpus.candidates import Spreading
    from snugfit.techniques.setup import Setup


class Distributed(Feature):
    """Simulate and price the steps of several processes, and of DeepSpeed's engine."""

    # ---- simulating and predicting a step ----

    def recorder_class(self, setup: Setup) -> type[Any] | None:
        """Return the recorder of streams and collectives for one of several ranks."""
        if ranks_of(setup) == 1:
            return None
        from snugfit.features.distributed.simulate.ranks import RankRecorder

        return RankRecorder

    def simulation_overrides(
        self, setup: Setup, policy: Any, recorder: Any, notes: Any
    ) -> AbstractContextManager[None]:
        """Return a context in which one process of several, or DeepSpeed's engine, runs on shapes."""
        if setup.parallel is not None:
            from snugfit.features.distributed.simulate.ranks import rank_on_shapes

            return rank_on_shapes(recorder, setup.parallel)
        if setup.sharding is not None:
            from snugfit.features.distributed.simulate.engine import engine_on_shapes

            return engine_on_shapes(recorder, setup.sharding.ranks)
        return super().simulation_overrides(setup, policy, recorder, notes)

    def treats_layers_alike(self, setup: Setup) -> bool:
        """Return False for several processes and for DeepSpeed's engine."""
        return setup.parallel is None and setup.sharding is None

    def exchanges(self) -> Any:
        """Return the figures of several processes."""
        from snugfit.features.distributed.price.exchanges import DistributedExchanges

        return DistributedExchanges()

    # ---- searching a plan ----

    def spreading(self) -> Spreading:
        """Return the ways of the techniques for several GPUs."""
        from snugfit.features.distributed.plan.ways import MeshSpreading

        return MeshSpreading()
