"""Memory ran out in a step, or is so short that steps crawl: with which recipe the run goes on.

Every front-end asks here; how it then goes on is its own (our loop builds the run anew, a fitted trainer
changes its live model, a hand-written loop gets an error and decides). No answer changes the global batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from snugfit.errors import OutOfMemory
from snugfit.job.job import Job
from snugfit.job.sample_mixing import mixing_of
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot
from snugfit.training.step_logger import RETRIES_IN_A_ROW, THRASHING

if TYPE_CHECKING:
    from snugfit.techniques.setup import Setup
    from snugfit.training.journal import Event, Journal


AGAIN_AFTER = (1, 4, 16, 64, 256, 1024)
"""Steps of a process after which pieces of a batch are compared with the whole again."""


@dataclass(frozen=True, kw_only=True)
class Unplanned:
    """What is gone on with where no plan could be made, None for nothing."""

    recipe: Recipe | None
    why: str


Replan = Callable[[Job, Recipe, str], Recipe | Unplanned | None]
"""A job, the recipe that ran out of memory and the cause: the recipe to go on with, or None."""

Compare = Callable[[Job, Any, Any, Mapping[str, Any], bool], Job]
"""A job, its training step, its live model, a host batch (B, ...), and True where steps were taken: the job,
with a reason in `mixes_samples` where the batch in pieces is another."""

STEP_BOUNDARY = "step boundary"
"""The phase of memory that was found to be short between two steps."""

PLANNING = "A recipe that needs less is being looked for; nothing trains until it is found."
"""What the journal says before a plan is made."""

WHAT_TO_TRY = (
    "With more free memory, the same run continues from its last checkpoint. Or start a run in a new "
    "folder with a recipe that needs less: snugfit plan --memory finds one."
)
"""Advice when memory ran out for good."""

CURE = (
    "Train with the whole batch, or let the loss be a sum that is divided by one count of the whole batch: "
    "num_items_in_batch in a Trainer's loss, items= of accelerate (the sum of a piece's weights, or its "
    "labels that count)."
)
"""Advice for a loss whose pieces do not add up."""


@dataclass(frozen=True, kw_only=True)
class Exhausted:
    """Memory ran out in a step. Gradients are dropped; weights have changed only if it was in the update."""

    cause: str
    """As `memory_cause` calls it, or `THRASHING`."""

    phase: str
    """Where in the step, or `STEP_BOUNDARY`."""

    message: str
    """What the exception said."""


def short_of_memory() -> Exhausted:
    """What a boundary finds when steps crawl."""
    return Exhausted(cause=THRASHING, phase=STEP_BOUNDARY, message=f"{RETRIES_IN_A_ROW} steps in a row")


def out_of_memory(exhausted: Exhausted, recipe: Recipe, step: int, advice: str) -> OutOfMemory:
    """The error that ends a run, in the `step` that follows so many."""
    return OutOfMemory(
        f"Memory ran out in step {step + 1} ({exhausted.phase}, {exhausted.cause}) under '{recipe}'."
        f" {advice} {exhausted.message.splitlines()[0]}"
    )


def cut_warning(job: Job, recipe: Recipe) -> Iterator[Event]:
    """A warning where this recipe, which the user has named, cuts a batch that is another in pieces."""
    cut = recipe[Slot.BATCHING]
    if recipe.setup().micro_batches > 1 and (why := cut.planning_objection(job)):
        cure = f" {CURE}" if job.mixes_samples or job.unclear_cut else ""
        yield {"event": "warning", "text": f"{cut}: {why}.{cure}"}


def compares_again(job: Job, setup: Setup, steps: int) -> bool:
    """Return True where the batch of this job, which is cut, is compared again after so many steps of this
    process. Steps that are recorded hold memory that nothing else may use, so theirs is not."""
    return steps in AGAIN_AFTER and setup.capture is None and not mixing_of(job).reason


def with_last_decision(before: Job, after: Job) -> Job:
    """Return the job that was compared again, unless that decided nothing."""
    return before if after.unclear_cut else after


@final
class Recovery:
    """Finds the recipe that a run goes on with."""

    def __init__(self, job: Job, journal: Journal, replan: Replan) -> None:
        self.job, self._journal, self._replan = job, journal, replan
        self._planning_seconds = 0.0

    def next_recipe(self, exhausted: Exhausted, recipe: Recipe, step: int) -> Recipe | None:
        """The recipe that follows this one, after so many steps. None, with a warning, where memory is only
        short and no other recipe is left. Raises `OutOfMemory` where it ran out. The journal says first that
        it is planned, which takes some seconds."""
        is_short = exhausted.phase == STEP_BOUNDARY
        what = "memory is short" if is_short else "memory ran out"
        text = f"Step {step + (not is_short)}: {what} ({exhausted.cause}) under '{recipe}'. {PLANNING}"
        self._journal.tell("note", text=text)
        began = time.monotonic()
        chosen = self._replan(self.job, recipe, exhausted.cause)
        if isinstance(chosen, Unplanned):
            instead = f" '{chosen.recipe}' is tried instead." if chosen.recipe else ""
            self._journal.tell("note", text=f"No recipe could be planned: {chosen.why}{instead}")
            chosen = chosen.recipe
        self._planning_seconds = time.monotonic() - began
        cuts = (kind for kind in roster.techniques() if kind.slot is Slot.BATCHING)
        uncut = next(filter(None, (kind.planning_objection(self.job) for kind in cuts)), "")
        why = f" (the batch cannot be cut: {uncut})" if uncut else ""
        if chosen is None and exhausted.phase != STEP_BOUNDARY:
            raise out_of_memory(
                exhausted, recipe, step, f"There is no other recipe to try{why}. {WHAT_TO_TRY}"
            )
        if chosen is None:
            what = f"Step {step}: memory is short ({exhausted.cause}, {exhausted.message}) under '{recipe}'"
            text = f"{what}, and there is no other recipe to try. The run continues, but slowly."
            self._journal.tell("warning", text=text)
        return chosen

    def tell(self, exhausted: Exhausted, before: Recipe, after: Recipe, step: int, **more: str | int) -> None:
        """Step `step` is made under another recipe."""
        self._journal.tell(
            "replanned",
            step=step,
            cause=exhausted.cause,
            before=str(before),
            recipe=str(after),
            planning_seconds=round(self._planning_seconds, 3),
            **more,
        )
