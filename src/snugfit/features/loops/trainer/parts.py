"""The part of a trainer's model and state that each of its processes has: all, unless a feature has another.

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
    """A trainer each of whose processes has all of the model, as in DDP."""

    word = "ddp"
    """Word of a checkpoint for the distribution of the model."""

    is_spread = False
    """True if each process has a part of the weights during training."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def refuse_settings(self) -> None:
        """Raise `UsageError` for unsupported settings of the trainer."""

    def refuse_recipe(self, setup: Setup, *, optimizer: str | None) -> None:
        """Raise `UsageError` for a recipe, without its sharding, that the parts do not support.

        `optimizer` is None for the recipe's own, or a name in `TrainingArguments`. An empty name is the
        user's own, which is checked after its creation.
        """

    def refuse_sharding(self, recipe: Recipe) -> None:
        """Raise `RecipeError` for a recipe whose sharding contradicts the trainer's configuration."""

    def spread_model(self) -> None:
        """Spread the model over the processes, as the Trainer does when training begins."""

    def drop_gathered(self) -> None:
        """Replace whole weights left by a forward pass with this process's parts."""

    def check(self, state: TrainState) -> None:
        """Check the optimizer and the schedule before the first step. Raises `SnugfitError`."""
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
        """Return the snapshot that this process writes. All processes call it."""
        beside: dict[str, Any] = {"random": random, "files": files, "processing": processing}
        return snapshot(state, staging, **beside) if state.ranks.is_first else None

    def load_weights(self, model: torch.nn.Module, folder: Path, ranks: Ranks) -> None:
        """Load the weights of a checkpoint into an existing model. Raises `SnugfitError` for another
        model's. All processes call it."""
        load_weights(model, weights_folder(folder))

    def restore(self, state: TrainState, folder: Path) -> None:
        """Restore the state of a run; its weights are already loaded."""
        restore(state, folder)


def trainer_parts(trainer: Any) -> TrainerParts:
    """Return the parts that this trainer's processes have."""
    parts: TrainerParts = state_parts().of_trainer(trainer) or TrainerParts(trainer)
    return parts
