"""What `fit` keeps with a trainer: its job and recipe, who watches, and where its step is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from snugfit.frontends.trainer.checkpoints import Keeping
    from snugfit.frontends.trainer.step_logger import Lines
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
    """Items of each of this step's micro-batches, once they were counted."""

    place: int = 0
    """How many of them were begun."""

    rows: int | None = None
    """Samples that a micro-batch is cut into once more, since memory ran out."""

    count: int = 0
    """How many there are."""

    divides: bool | None = None
    """Whether the model's loss depends on `num_items_in_batch`; None before it was asked."""

    shifts: bool | None = None
    """Whether it shifts its labels by one, likewise."""

    corrected: bool = False
    """Whether it was said what transformers would do wrong with its loss."""

    seen: tuple[float, float, int] | None = None
    """Loss of the last step, the norm of its gradients, and its tokens."""

    lines: Lines | None = None
    """The journal's lines of the `train()` that is going on."""

    keeping: Keeping | None = None
    """The checkpoints of the `train()` that is going on."""

    lost: torch.Tensor | None = None
    """The losses of this step's micro-batches so far, weighed and added."""

    left_over: int = 0
    """Micro-batches of the step that has begun and not come to its update; 0 where there is none."""

    began: tuple[torch.Tensor, ...] = ()
    """The generators of a forward pass when this step began."""

    logged: torch.Tensor | None = None
    """What the Trainer's losses since its last log came to when this step began."""

    batch: list[Any] = field(default_factory=list)
    """This step's micro-batches."""

    told: set[str] = field(default_factory=set)
    """What was said once."""

    def cut(self, recipe: Recipe) -> None:
        """From here on under this recipe, which cuts the batch finer than the loader does."""
        self.recipe, self.rows = recipe, self.job.batch_size // recipe.setup().micro_batches

    @property
    def told_of(self) -> Lines:
        """Those of the `train()` that is going on."""
        assert self.lines is not None, "outside of train()"
        return self.lines

    @property
    def checkpoints(self) -> Keeping:
        """Those of the `train()` that is going on."""
        assert self.keeping is not None, "outside of train()"
        return self.keeping

    def tell(self, event: str, **fields: Any) -> None:
        """Something happened."""
        if self.keeping is not None:
            self.keeping.journal.tell(event, **fields)
        else:
            self.watch({"event": event, **fields})

    def warn_once(self, text: str) -> bool:
        """A warning, the first time; whether there is one."""
        if text and text not in self.told:
            self.told.add(text)
            self.tell("warning", text=text)
        return bool(text)
