"""What a trainer was fitted to: its job, its recipe, and who hears of what happens.

The plan stands on the trainer (`trainer.snugfit`) and never changes; when memory runs out another takes its
place. What changes from step to step is the `StepState` of the run (`fit_run.py`).
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
    """What a trainer trains under."""

    job: Job
    recipe: Recipe
    user_slots: frozenset[Slot]
    """Slots that stay as the user has them."""

    journal: Journal
    """Takes events to whoever listens, and into the run's folder while `train()` goes on."""

    compare_code: bool = True
    """Whether a run is resumed with the code that it began with alone."""

    samples: Mapping[str, Any] | None = None
    """A host batch for comparisons during a run; None where the job's example is one."""

    loss: LossTraits = field(default_factory=LossTraits)
    """What is known of the model's loss."""

    max_rows: int | None = None
    """Samples that a micro-batch of the loader's is cut into once more, since memory ran out."""

    def cut_finer(self, recipe: Recipe) -> FitPlan:
        """The plan under this recipe, which cuts the batch finer than the loader does."""
        return replace(self, recipe=recipe, max_rows=self.job.batch_size // recipe.setup().micro_batches)
