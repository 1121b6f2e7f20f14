"""What `fit` keeps with a trainer: its job and recipe, who watches, and where its step is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.technique import Slot
    from snugfit.training.journal import Event


@dataclass(kw_only=True)
class Fitted:
    """A trainer's recipe, and what its subclass remembers between its methods."""

    job: Job
    recipe: Recipe
    left: frozenset[Slot]
    """Slots that stay as the user has them."""

    watch: Callable[[Event], None]
    """Hears every event."""

    share: float | None = None
    """Of the batch's items, those of the micro-batch that is being trained; None in an evaluation."""

    pieces: list[int] = field(default_factory=list)
    """Items of this step's micro-batches that are still to come."""

    total: int = 0
    """Items of all of them."""

    count: int = 0
    """How many there are."""

    divides: bool | None = None
    """Whether the model's loss depends on `num_items_in_batch`; None before it was asked."""

    told: set[str] = field(default_factory=set)
    """What was said once."""

    def tell(self, event: str, **fields: Any) -> None:
        """Something happened."""
        self.watch({"event": event, **fields})

    def warn_once(self, text: str) -> None:
        """A warning, the first time; none is none."""
        if text and text not in self.told:
            self.told.add(text)
            self.tell("warning", text=text)
