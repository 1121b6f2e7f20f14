"""The result that a training run returns, and the error for a last checkpoint that could not be saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from snugfit.errors import SnugfitError
from snugfit.techniques.recipe import Recipe
from snugfit.training.run.evaluate import EvaluationResult

if TYPE_CHECKING:
    import torch

FINISHED, EARLY, STOPPED = "finished", "stopped early", "stopped"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The outcome of a training run, with its model and its last metrics."""

    outcome: str
    """Reason for the end: `finished`, `stopped early` (evaluations no longer improved) or `stopped` (by a
    signal)."""

    exit_code: int
    """Exit code of the process: 0; after a signal 75 or 130, if the run can be resumed."""

    step: int
    """Number of finished optimizer steps."""

    recipe: Recipe
    """Recipe (set of techniques) at the end of the run. It may have changed after a lack of memory."""

    loss: float
    """Loss of the last step; NaN if the run had no step."""

    evaluated: EvaluationResult | None
    """Metrics of the last evaluation; None without one."""

    folder: Path
    """Folder of the run's checkpoints and its journal."""

    model: torch.nn.Module
    """Model after the last step, or after the step with the best evaluation if requested."""


class LastCheckpointNotSaved(SnugfitError):
    """Error: a run has ended, and its last checkpoint could not be saved."""

    def __init__(self, reason: str, trained: Trained) -> None:
        super().__init__(reason)
        self.trained = trained
        """Results of the run, whose last checkpoint could not be saved."""
