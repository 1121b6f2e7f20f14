"""The interface for checkpoints of sharded runs, in which each process has a part of the state.

A process has the whole model and all optimizer states, unless a feature spreads them over several processes
(`Feature.state_parts`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.techniques.registry import hooks

if TYPE_CHECKING:
    import torch

    from snugfit.training.checkpoint.staging import Staging


class StateParts:
    """Checkpoint operations for a process that has the whole state. A feature overrides them for shards.
    `state` is a `TrainState`."""

    def is_spread(self, state: Any) -> bool:
        """Return True if this process has only parts of the weights, layers or optimizer states."""
        return False

    def lacks_layers(self, model: torch.nn.Module) -> bool:
        """Return True if other processes have other layers of this model (pipeline stages)."""
        return False

    def local_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer that has this process's states: the given one, or one that it wraps."""
        return optimizer

    def loads_on_host(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if saved states are first read to the host, before `restore` moves them to their
        devices.
        """
        return False

    def own_states(
        self, model: torch.nn.Module, saved: Mapping[str, Any], optimized: Sequence[str], names: Iterable[str]
    ) -> tuple[Sequence[str], Mapping[str, Any]]:
        """Return the names of this process's weights and their optimizer state, selected from the saved state
        of all `optimized` weights.
        """
        return optimized, saved

    def tensor_bytes(self, state: Any) -> list[int] | None:
        """Return the bytes of each tensor in this process's snapshot; None if the sizes follow from the model
        and the optimizer.
        """
        return None

    def snapshot(self, state: Any, staging: Staging, *, random: Sequence[Any], is_last: bool) -> Any:
        """Return a copy on the host of this process's part of the run's state (`WrittenByAll`). With
        `is_last` the first process has the whole model too.
        """
        raise NotImplementedError

    def has_files(self, folder: Path) -> bool:
        """Return True if several processes wrote this checkpoint, each its own files."""
        return False

    def load_weights(self, model: torch.nn.Module, folder: Path, ranks: Any) -> None:
        """Load weights and the model's state from a checkpoint of several processes. All processes call
        it."""

    def restore(self, state: Any, folder: Path) -> None:
        """Replace the restored state of the run by this process's shard, and load its other files from
        `folder`.
        """

    def of_trainer(self, trainer: Any) -> Any:
        """Return the checkpoint operations for a Trainer with sharded weights; None if each process has the
        whole model.
        """


@functools.cache
def state_parts() -> StateParts:
    """Return the checkpoint operations of the feature that shards states, or the default ones if no feature
    does.
    """
    parts: StateParts = next((make() for make in hooks("state_parts")), StateParts())
    return parts


def updated_elsewhere(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the weights whose optimizer states and updates belong to other processes."""
    inside = state_parts().local_optimizer(optimizer).param_groups
    own = {id(weight) for group in inside for weight in group["params"]}
    return [weight for group in optimizer.param_groups for weight in group["params"] if id(weight) not in own]
