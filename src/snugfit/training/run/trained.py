"""The result that a training run returns, and the error for a last checkpoint that could not be saved."""

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
    """The outcome of a training run, with its model and its last metrics."""

    outcome: str
    """`finished`; `stopped early`, without further gain in evaluations; or `stopped` by a signal."""

    exit_code: int
    """0; 75 or 130 after a signal, if the run can be resumed."""

    step: int
    """Number of finished optimizer steps."""

    recipe: Recipe
    """The recipe at the end of the run."""

    loss: float
    """Loss of the last step; NaN without one."""

    evaluated: Evaluated | None
    """Metrics of the last evaluation; None without one."""

    folder: Path
    """The folder of its checkpoints and its journal."""

    model: torch.nn.Module
    """The model after the last step, or that of the best evaluation if requested."""


class LastNotKept(SnugfitError):
    """Error: a run has ended, and its last checkpoint could not be saved."""

    def __init__(self, why: str, trained: Trained) -> None:
        super().__init__(why)
        self.trained = trained
        """The outcome of the run."""
