"""Implementation of `StateParts`: saving and loading of the state that one of several processes has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.features.distributed.apply.sharded_optimizer import local_optimizer
from snugfit.features.distributed.apply.stages import is_stage
from snugfit.features.distributed.checkpoint import shards
from snugfit.features.distributed.checkpoint.joined_state import own_part
from snugfit.features.distributed.engine.config import is_of_engine
from snugfit.features.distributed.engine.owners import part_bytes
from snugfit.training.checkpoint.model_state import load_model_state
from snugfit.training.checkpoint.parts import StateParts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch


class SpreadState(StateParts):
    """Checkpoint operations of one of several processes: parts of weights, layers or optimizer states, saved
    in shards.
    """

    is_spread = staticmethod(shards.is_sharded)
    lacks_layers = staticmethod(is_stage)
    local_optimizer = staticmethod(local_optimizer)
    loads_on_host = staticmethod(is_of_engine)
    snapshot = staticmethod(shards.shards_of)
    has_files = staticmethod(shards.has_shards)

    def own_states(
        self, model: torch.nn.Module, saved: Mapping[str, Any], optimized: Sequence[str], names: Iterable[str]
    ) -> tuple[Sequence[str], Mapping[str, Any]]:
        """Return the names and the optimizer states of this stage's weights."""
        return own_part(saved, optimized, names) if is_stage(model) else (optimized, saved)

    def tensor_bytes(self, state: Any) -> list[int] | None:
        """Return the bytes of each tensor that this process writes for DeepSpeed's engine; None if no engine
        runs.
        """
        is_own = is_of_engine(state.optimizer)
        return part_bytes(state.model, state.ranks.rank, state.ranks.size) if is_own else None

    def load_weights(self, model: torch.nn.Module, folder: Path, ranks: Any) -> None:
        """Load weights from shards, whole or in parts, and the rest of the model's state."""
        shards.load_weight_shards(model, folder, ranks)
        load_model_state(model, folder)

    def of_trainer(self, trainer: Any) -> Any:
        """Return the checkpoint operations for a Trainer with DDP, or with FSDP2 where it is configured."""
        from snugfit.features.distributed.trainer.sharded import DdpTrainer, ShardedTrainer

        return (ShardedTrainer if trainer.is_fsdp_enabled else DdpTrainer)(trainer)

    def restore(self, state: Any, folder: Path) -> None:
        """Load shards into the run's state, or keep this process's parts of whole states."""
        if shards.is_sharded(state):
            shards.keep_parts(state.optimizer)
        if is_of_engine(state.optimizer):
            shards.load_states_of_engine(state, folder)
        elif shards.has_shards(folder):
            shards.load_shards(state, folder)
            load_model_state(state.model, folder)
