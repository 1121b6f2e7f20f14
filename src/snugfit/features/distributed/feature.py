"""Training of one model on several GPUs, and DeepSpeed's engine on one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.techniques.feature import Feature
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.techniques.recipe import Recipe


class Distributed(Feature):
    """Add the techniques of the slots for several GPUs, and their handlers."""

    techniques: ClassVar[Mapping[Slot, tuple[str, ...]]] = {
        Slot.SHARDING: tuple(
            f"techniques.{name}" for name in ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")
        ),
        Slot.TENSOR_PARALLEL: ("techniques.tensor",),
        Slot.CONTEXT_PARALLEL: ("techniques.context",),
        Slot.PIPELINE_PARALLEL: ("techniques.pipeline",),
        Slot.EXPERT_PARALLEL: ("techniques.expert",),
    }

    # ---- running a step ----

    def handlers(self) -> Sequence[Any]:
        """Return the handlers of both fields."""
        from snugfit.features.distributed.apply.parallel import ParallelHandler
        from snugfit.features.distributed.engine.sharding import ShardingHandler

        return ParallelHandler(), ShardingHandler()

    def state_parts(self) -> Any:
        """Return the code for shards in checkpoints."""
        from snugfit.features.distributed.checkpoint.parts import SpreadState

        return SpreadState()

    def trainer_parts(self, trainer: Any) -> Any:
        """Return the code for a Trainer by DDP, or by FSDP2 where it is configured."""
        from snugfit.features.distributed.trainer.sharded import DdpTrainer, ShardedTrainer

        return (ShardedTrainer if trainer.is_fsdp_enabled else DdpTrainer)(trainer)

    # ---- the command line ----

    def read_mesh(self, recipe: Recipe, text: str) -> tuple[Recipe, int]:
        """Return the recipe with the techniques of a mesh, and its number of GPUs."""
        from snugfit.features.distributed.mesh import on_mesh

        return on_mesh(recipe, text)
