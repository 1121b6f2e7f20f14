"""The plan of a fitted trainer: its job, its recipe and its journal.

The plan is an attribute of the trainer (`trainer.snugfit`) and immutable; when memory runs out another one
replaces it. State that changes from step to step is in the `StepState` of the run (`fit_run.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from snugfit.frontends.trainer.loss import LossTraits

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.technique import Slot
    from snugfit.training.journal import Journal


@dataclass(frozen=True, kw_only=True)
class FitPlan:
    """Job, recipe and journal of a fitted trainer."""

    job: Job
    recipe: Recipe
    user_slots: frozenset[Slot]
    """Slots that stay under the user's control."""

    journal: Journal
    """Sends events to the listener, and to the run's folder during `train()`."""

    compare_code: bool = True
    """Resume a run only with unchanged code."""

    samples: Mapping[str, Any] | None = None
    """A host batch for comparisons during a run; None where the job's example is one."""

    loss: LossTraits = field(default_factory=LossTraits)
    """Properties of the model's loss."""

    max_rows: int | None = None
    """Most samples of each piece, if the loader's micro-batches are split again after memory ran out."""

    def cut_finer(self, recipe: Recipe) -> FitPlan:
        """Return the plan under this recipe, which splits the batch finer than the loader."""
        return replace(self, recipe=recipe, max_rows=self.job.batch_size // recipe.setup().micro_batches)
