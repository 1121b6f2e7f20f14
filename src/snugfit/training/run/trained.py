"""How a run ended, and with what."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from snugfit.errors import SnugfitError
from snugfit.techniques.recipe import Recipe
from snugfit.training.run.evaluate import Evaluated

if TYPE_CHECKING:
    import torch

FINISHED, EARLY, STOPPED = "finished", "stopped early", "stopped"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """How a run ended, and with what."""

    outcome: str
    """`finished`; `stopped early`, for the evaluations gained nothing more; `stopped` by a signal."""

    exit_code: int
    """0; 75 or 130 when a signal stopped it and it can be resumed."""

    step: int
    """Optimizer steps that are done."""

    recipe: Recipe
    """Under which it ended."""

    loss: float
    """Of the last step that was made; NaN when there was none."""

    evaluated: Evaluated | None
    """What the last evaluation came to; None where there was none."""

    folder: Path
    """Where its checkpoints and its journal are."""

    model: torch.nn.Module
    """As the last step left it, or the best evaluation's, where that was asked for."""


class LastNotKept(SnugfitError):
    """A run has ended, and its last checkpoint could not be kept."""

    def __init__(self, why: str, trained: Trained) -> None:
        super().__init__(why)
        self.trained = trained
        """What the run came to."""
