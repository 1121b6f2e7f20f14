"""Checkpoint code for training in several processes: saving and loading of the shards that each process
has.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.features.distributed.apply.sharded_optimizer import local_optimizer
from snugfit.features.distributed.apply.stages import is_stage
from snugfit.features.distributed.checkpoint import shards
from snugfit.features.distributed.checkpoint.gathered_adapters import gathered_adapters
from snugfit.features.distributed.checkpoint.joined_state import own_part
from snugfit.features.distributed.engine.config import is_of_engine
from snugfit.features.distributed.engine.owners import part_bytes
from snugfit.training.checkpoint.adapters import is_adapted
from snugfit.training.checkpoint.model_state import load_model_state
from snugfit.training.checkpoint.parts import StateParts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from snugfit.training.checkpoint.staging import Staging


class SpreadState(StateParts):
    """Saves and loads checkpoints in one of several processes: shards of weights, layers or optimizer
    states.
    """

    is_spread = staticmethod(shards.is_sharded)
    lacks_layers = staticmethod(is_stage)
    local_optimizer = staticmethod(local_optimizer)
    loads_on_host = staticmethod(is_of_engine)
    has_files = staticmethod(shards.has_shards)

    def own_states(
        self, model: torch.nn.Module, saved: Mapping[str, Any], optimized: Sequence[str], names: Iterable[str]
    ) -> tuple[Sequence[str], Mapping[str, Any]]:
        """Return the names of the weights of this process's pipeline stages, and their optimizer states."""
        return own_part(saved, optimized, names) if is_stage(model) else (optimized, saved)

    def snapshot(self, state: Any, staging: Staging, *, random: Sequence[Any], is_last: bool) -> Any:
        """Return a copy on the host of this process's shards. Adapters are copied whole, by the first process
        alone.
        """
        if is_adapted(state.model):
            return gathered_adapters(state, staging, random=random)
        return shards.shards_of(state, staging, random=random, is_last=is_last)

    def tensor_bytes(self, state: Any) -> list[int] | None:
        """Return the bytes of each tensor that this process writes for DeepSpeed's engine; None if no engine
        runs. Gathered adapters need no memory in advance.
        """
        if is_adapted(state.model) and shards.is_sharded(state):
            return []
        is_own = is_of_engine(state.optimizer)
        return part_bytes(state.model, state.ranks.rank, state.ranks.size) if is_own else None

    def load_weights(self, model: torch.nn.Module, folder: Path, ranks: Any) -> None:
        """Load the model's weights from a checkpoint of shards, and the rest of the model's state."""
        shards.load_weight_shards(model, folder, ranks)
        load_model_state(model, folder)

    def of_trainer(self, trainer: Any) -> Any:
        """Return the code that saves and loads a Trainer's checkpoints: for DDP, or for FSDP2 if the Trainer
        uses it.
        """
        from snugfit.features.distributed.trainer.sharded import DdpTrainer, ShardedTrainer

        return (ShardedTrainer if trainer.is_fsdp_enabled else DdpTrainer)(trainer)

    def restore(self, state: Any, folder: Path) -> None:
        """Load a checkpoint into the model and optimizer of this process, from saved shards, or its own
        shards of tensors that were saved whole.
        """
        if shards.is_sharded(state):
            shards.keep_parts(state.optimizer)
        if is_of_engine(state.optimizer):
            shards.load_states_of_engine(state, folder)
        elif shards.has_shards(folder):
            shards.load_shards(state, folder)
            load_model_state(state.model, folder)
