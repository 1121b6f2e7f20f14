"""What a trainer was fitted to: its job, its recipe, and who hears of what happens.

The plan stands on the trainer (`trainer.snugfit`) and never changes; when memory runs out another takes its
place. What changes from step to step is the `StepState` of the run (`fit_run.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from snugfit.frontends.trainer.loss import LossTraits

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.technique import Slot
    from snugfit.training.journal import Event, Journal


class Notices:
    """Takes the events of a fitted trainer to its journal while `train()` goes on, and to `watch` at any
    other time."""

    def __init__(self, watch: Callable[[Event], None]) -> None:
        self.watch = watch
        self.journal: Journal | None = None
        """Where events go while `train()` goes on; it hands them to `watch` too."""
        self._warned: set[str] = set()

    def tell(self, event: str, **fields: Any) -> None:
        """Passes one event on."""
        if self.journal is not None:
            self.journal.tell(event, **fields)
        else:
            self.watch({"event": event, **fields})

    def warn_once(self, text: str) -> bool:
        """Passes a warning on the first time that it is given; says whether `text` is one at all."""
        if text and text not in self._warned:
            self._warned.add(text)
            self.tell("warning", text=text)
        return bool(text)


@dataclass(frozen=True, kw_only=True)
class FitPlan:
    """What a trainer trains under."""

    job: Job
    recipe: Recipe
    user_slots: frozenset[Slot]
    """Slots that stay as the user has them."""

    notices: Notices
    """Takes events to whoever listens."""

    compare_code: bool = True
    """Whether a run is resumed with the code that it began with alone."""

    loss: LossTraits = field(default_factory=LossTraits)
    """What is known of the model's loss."""

    max_rows: int | None = None
    """Samples that a micro-batch of the loader's is cut into once more, since memory ran out."""

    def cut_finer(self, recipe: Recipe) -> FitPlan:
        """The plan under this recipe, which cuts the batch finer than the loader does."""
        return replace(self, recipe=recipe, max_rows=self.job.batch_size // recipe.setup().micro_batches)
