"""Registration of the feature `distributed`: training on several GPUs, and DeepSpeed's engine on one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.features.distributed.fields import PARALLEL, SHARDING
from snugfit.techniques.feature import Feature
from snugfit.techniques.several_gpus import ranks_of
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.setup import Setup


class Distributed(Feature):
    """The feature that adds the techniques for several GPUs, with their handlers, simulation and
    predictions."""

    needs: ClassVar[Mapping[str, str]] = {"sharded": "loops"}
    techniques: ClassVar[Mapping[Slot, tuple[str, ...]]] = {
        Slot.SHARDING: tuple(
            f"techniques.{name}" for name in ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")
        ),
        Slot.TENSOR_PARALLEL: ("techniques.tensor",),
        Slot.CONTEXT_PARALLEL: ("techniques.context",),
        Slot.PIPELINE_PARALLEL: ("techniques.pipeline",),
        Slot.EXPERT_PARALLEL: ("techniques.expert",),
    }

    public_names: ClassVar[Mapping[str, tuple[str, ...]]] = {"plan.search": ("plan_several_gpus",)}

    def reports(self) -> Mapping[type, Callable[[Any], Any]]:
        """Return the functions that render plans for several GPUs as reports, in a dict by the
        plan's class.
        """
        from snugfit.features.distributed.plan.plan import SeveralGpusPlan
        from snugfit.features.distributed.plan.report import render

        return {SeveralGpusPlan: render}

    # ---- running a step ----

    def handlers(self) -> Sequence[Any]:
        """Return the handlers that apply the fields `parallel` and `sharding` of `Setup` to a
        training run.
        """
        from snugfit.features.distributed.apply.parallel import ParallelHandler
        from snugfit.features.distributed.engine.sharding import ShardingHandler

        return ParallelHandler(), ShardingHandler()

    def tensor_parts(self) -> Any:
        """Return the operations on tensors that are sharded over processes."""
        from snugfit.features.distributed.apply.meshes import MeshParts

        return MeshParts()

    def state_parts(self) -> Any:
        """Return the code that saves and loads shards of checkpoints (`StateParts`)."""
        from snugfit.features.distributed.checkpoint.parts import SpreadState

        return SpreadState()

    def processes(self) -> Any:
        """Return the module that starts and restarts the processes of a run, and finds slow processes."""
        from snugfit.features.distributed import processes

        return processes

    # ---- the command line ----

    def documents(self) -> Mapping[str, type]:
        """Return the classes of the JSON output of plans for several GPUs, by command."""
        from snugfit.features.distributed.plan.plan import CardPlans, SeveralGpusPlan

        return {"plan --gpus N --json": SeveralGpusPlan, "gpus --for MODEL --gpus N --json": CardPlans}

    def read_mesh(self, recipe: Recipe, text: str) -> tuple[Recipe, int]:
        """Return the recipe with the techniques of a mesh (`fsdp=4, tensor=2`), and its number of GPUs."""
        from snugfit.features.distributed.mesh import on_mesh

        return on_mesh(recipe, text)

    # ---- simulating and predicting a step ----

    def recorder_class(self, setup: Setup) -> type[Any] | None:
        """Return the class that records streams and collectives of one of several ranks; None for one
        process."""
        if ranks_of(setup) == 1:
            return None
        from snugfit.features.distributed.simulate.ranks import RankRecorder

        return RankRecorder

    def simulation_overrides(
        self, setup: Setup, policy: Any, recorder: Any, notes: Any
    ) -> AbstractContextManager[None]:
        """Return a context in which one of several ranks, or DeepSpeed's engine, runs on tensors without
        data.
        """
        parallel, sharding = PARALLEL.of(setup), SHARDING.of(setup)
        if parallel is not None:
            from snugfit.features.distributed.simulate.ranks import rank_on_shapes

            return rank_on_shapes(recorder, parallel)
        if sharding is not None:
            from snugfit.features.distributed.simulate.engine import engine_on_shapes

            return engine_on_shapes(recorder, sharding.ranks)
        return super().simulation_overrides(setup, policy, recorder, notes)

    def treats_layers_alike(self, setup: Setup) -> bool:
        """Return True if all layers have equal memory and kernels. Not assumed for several processes, or for
        DeepSpeed's engine.
        """
        return PARALLEL.of(setup) is None and SHARDING.of(setup) is None

    def exchanges(self) -> Any:
        """Return the object that predicts bytes and seconds of NCCL collectives and pipeline stages
        (`Exchanges`).
        """
        from snugfit.features.distributed.price.exchanges import DistributedExchanges

        return DistributedExchanges()
