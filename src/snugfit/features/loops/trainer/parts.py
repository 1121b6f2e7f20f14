"""The interface for models that a Trainer spreads over several processes.

A feature that spreads the model gives its own (`StateParts.of_trainer`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.features.loops.trainer.users_files import weights_folder
from snugfit.training.checkpoint.parts import state_parts
from snugfit.training.checkpoint.state import check_packable, restore, snapshot
from snugfit.training.checkpoint.weights import load_weights

if TYPE_CHECKING:
    import torch

    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.setup import Setup
    from snugfit.training.checkpoint.manager import Writable
    from snugfit.training.checkpoint.staging import Staging
    from snugfit.training.checkpoint.state import TrainState
    from snugfit.training.ranks import Ranks


class TrainerParts:
    """Operations on a trainer's model and checkpoints for processes that each have the whole model, as in
    DDP. A feature overrides them for shards."""

    word = "ddp"
    """Word in a checkpoint for the kind of sharding."""

    is_spread = False
    """True if each process has only a part of the weights during training."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def refuse_settings(self) -> None:
        """Raise `UsageError` for unsupported settings of the trainer."""

    def refuse_recipe(self, setup: Setup, *, optimizer: str | None) -> None:
        """Raise `UsageError` for a recipe, given without its sharding, that this trainer's sharding does not
        support.

        `optimizer` is None for the recipe's own, or a name in `TrainingArguments`. An empty name is the
        user's own, which is checked after its creation.
        """

    def refuse_sharding(self, recipe: Recipe) -> None:
        """Raise `RecipeError` for a recipe whose sharding contradicts the trainer's configuration."""

    def spread_model(self) -> None:
        """Spread the model over the processes, as the Trainer does when training begins."""

    def drop_gathered(self) -> None:
        """Free whole weights that a forward pass has gathered, and keep this process's shards."""

    def check(self, state: TrainState) -> None:
        """Raise `SnugfitError` before the first step for an optimizer or a schedule that the
        run cannot use.
        """
        check_packable(state)

    def snapshot(
        self,
        state: TrainState,
        staging: Staging,
        *,
        random: Sequence[Any],
        files: Mapping[str, str],
        processing: Any,
        is_stopped: bool,
    ) -> Writable | None:
        """Return the copy of the run's state that this process writes into a checkpoint. All processes call
        it.
        """
        beside: dict[str, Any] = {"random": random, "files": files, "processing": processing}
        return snapshot(state, staging, **beside) if state.ranks.is_first else None

    def load_weights(self, model: torch.nn.Module, folder: Path, ranks: Ranks) -> None:
        """Load the weights of a checkpoint into an existing model. Raises `SnugfitError` for another
        model's. All processes call it."""
        load_weights(model, weights_folder(folder))

    def restore(self, state: TrainState, folder: Path) -> None:
        """Restore the state of a run from a checkpoint; its weights are already loaded."""
        restore(state, folder)


def trainer_parts(trainer: Any) -> TrainerParts:
    """Return the operations on model and checkpoints for this trainer's sharding (none, DDP or FSDP2)."""
    parts: TrainerParts = state_parts().of_trainer(trainer) or TrainerParts(trainer)
    return parts
