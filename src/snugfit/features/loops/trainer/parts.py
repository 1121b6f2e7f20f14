"""The interface for models that a Trainer shards over several processes.

A feature that shards the model provides its own implementation (`StateParts.of_trainer`).
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
    """Operations on a trainer's model and checkpoints, for processes that each have the whole model, as in
    DDP. A feature for sharding overrides them.
    """

    word = "ddp"
    """Name of the kind of sharding in a checkpoint."""

    is_spread = False
    """True if each process has only a part of the weights during training."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def refuse_settings(self) -> None:
        """Raise `UsageError` for unsupported settings of the trainer."""

    def refuse_recipe(self, setup: Setup, *, optimizer: str | None) -> None:
        """Raise `UsageError` for a recipe, given without its sharding, that this trainer's sharding does not
        support.

        `optimizer` is None for the recipe's optimizer, or a name in `TrainingArguments`. An empty name means
        the user's own, which is checked after its creation.
        """

    def refuse_sharding(self, recipe: Recipe) -> None:
        """Raise `RecipeError` for a recipe whose sharding contradicts that of the trainer."""

    def spread_model(self) -> None:
        """Shard the model over the processes, as the Trainer does when training begins."""

    def drop_gathered(self) -> None:
        """Free the full weights that a forward pass has all-gathered, and keep this process's shards."""

    def check(self, state: TrainState) -> None:
        """Before the first step, raise `SnugfitError` for an optimizer or a schedule that the run cannot
        save.
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
        """Load the weights of a checkpoint into an existing model. Raises `SnugfitError` for a checkpoint of
        another model. All processes call it.
        """
        load_weights(model, weights_folder(folder))

    def restore(self, state: TrainState, folder: Path) -> None:
        """Restore the optimizer and other training state from a checkpoint, after its weights were loaded."""
        restore(state, folder)


def refusals_of(trainer: Any) -> TrainerParts:
    """Return the checks of a trainer's settings and recipe. Those of whole weights refuse nothing."""
    return trainer_parts(trainer) if trainer.is_fsdp_enabled else TrainerParts(trainer)


def trainer_parts(trainer: Any) -> TrainerParts:
    """Return the operations on model and checkpoints that suit this trainer's sharding (none, DDP or
    FSDP2).
    """
    parts: TrainerParts = state_parts().of_trainer(trainer) or TrainerParts(trainer)
    return parts
