"""Recovery from exhausted GPU memory: the choice of another recipe for the rest of a run.

Every front-end uses this module, but applies the new recipe in its own way. snugfit's loop builds the model
again, a wrapped Trainer changes its live model, and a hand-written loop receives an error. The global batch
never changes.
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


RECHECK_STEPS = (1, 4, 16, 64, 256, 1024)
"""Numbers of finished steps after which the check is repeated that micro-batches give the gradients of the
whole batch."""


@dataclass(frozen=True, kw_only=True)
class PlanFailure:
    """The reason why no plan was possible, and a recipe that needs less memory, if one was found without a
    plan.
    """

    recipe: Recipe | None
    reason: str


Replan = Callable[[Job, Recipe, str], Recipe | PlanFailure | None]
"""The type of a function that returns the next recipe after a lack of memory, or None. Its arguments are the
job, the failed recipe, and the cause."""

Compare = Callable[[Job, Any, Any, Mapping[str, Any], bool], Job]
"""The type of a function that checks if micro-batches give the gradients of the whole batch.

Its arguments are a job, its training step, its live model, a host batch (B, ...), and True after the first
step. It returns the job. If the gradients differ, the job's `mixes_samples` has the reason.
"""

STEP_BOUNDARY = "step boundary"
"""Name of the phase for memory that ran short between two steps."""

PLANNING = "A recipe that needs less is being looked for; nothing trains until it is found."
"""Note in the run's journal before the search for another recipe."""

WHAT_TO_TRY = (
    "With more free memory, the same run continues from its last checkpoint. Or start a run in a new "
    "folder with a recipe that needs less: snugfit plan --memory finds one."
)
"""Advice for a run that ran out of memory and has no other recipe."""

CURE = (
    "Train with the whole batch, or let the loss be a sum that is divided by one count of the whole batch. "
    "In a Trainer's loss that is num_items_in_batch. For accelerate it is items=: the sum of a piece's "
    "weights, or its labels that count."
)
"""Advice for a loss whose sum over micro-batches differs from the loss of the whole batch."""


@dataclass(frozen=True, kw_only=True)
class Exhausted:
    """A step that ran out of memory. Its gradients are dropped. Weights have changed only if the memory ran
    out in the update.
    """

    cause: str
    """Cause of the lack of memory: a result of `memory_cause`, or `THRASHING`."""

    phase: str
    """Phase of the step in which memory ran out, or `STEP_BOUNDARY`."""

    message: str
    """Message of the out-of-memory exception."""


def short_of_memory() -> Exhausted:
    """Return an `Exhausted` record for steps that are slow because the allocator frees its cache and
    retries.
    """
    return Exhausted(cause=THRASHING, phase=STEP_BOUNDARY, message=f"{RETRIES_IN_A_ROW} steps in a row")


def out_of_memory(exhausted: Exhausted, recipe: Recipe, step: int, advice: str) -> OutOfMemory:
    """Return the error for memory that ran out in the step after `step`, which ends the run."""
    return OutOfMemory(
        f"Memory ran out in step {step + 1} ({exhausted.phase}, {exhausted.cause}) under '{recipe}'."
        f" {advice} {exhausted.message.splitlines()[0]}"
    )


def cut_warning(job: Job, recipe: Recipe) -> Iterator[Event]:
    """Yield a warning event if the user's micro-batches give other gradients than the whole batch."""
    cut = recipe[Slot.BATCHING]
    if recipe.pieces > 1 and (reason := cut.planning_objection(job)):
        cure = f" {CURE}" if job.mixes_samples or job.unclear_cut else ""
        yield {"event": "warning", "text": f"{cut}: {reason}.{cure}"}


def compares_again(job: Job, setup: Setup, steps: int) -> bool:
    """Return True if split and whole batches are compared again after this number of steps of the process.

    Steps recorded as CUDA graphs are excluded: their memory must not be used for anything else.
    """
    return steps in RECHECK_STEPS and not setup.records_graphs and not mixing_of(job).reason


@final
class Recovery:
    """Selects the recipe with which a training run continues after it ran out of memory."""

    def __init__(self, job: Job, journal: Journal, replan: Replan) -> None:
        self.job, self._journal, self._replan = job, journal, replan
        self._planning_seconds = 0.0

    def replan(self, recipe: Recipe, cause: str) -> tuple[Recipe | None, str]:
        """Return a recipe that needs less memory, or None, and the reason if no plan could be made."""
        chosen = self._replan(self.job, recipe, cause)
        return (chosen.recipe, chosen.reason) if isinstance(chosen, PlanFailure) else (chosen, "")

    def next_recipe(self, exhausted: Exhausted, recipe: Recipe, step: int) -> Recipe | None:
        """Return the recipe that replaces the current one after it ran out of memory, `step` steps into the
        run.

        If memory is only short (the allocator retries in each step) and no other recipe is left, return None
        with a warning. Raises `OutOfMemory` if memory ran out and no other recipe is left. A plan takes some
        seconds, so a note is written into the journal before.
        """
        is_short = exhausted.phase == STEP_BOUNDARY
        event = "memory is short" if is_short else "memory ran out"
        text = f"Step {step + (not is_short)}: {event} ({exhausted.cause}) under '{recipe}'. {PLANNING}"
        self._journal.tell("note", text=text)
        began = time.monotonic()
        chosen, unplanned = self.replan(recipe, exhausted.cause)
        if unplanned:
            instead = f" '{chosen}' is tried instead." if chosen else ""
            self._journal.tell("note", text=f"No recipe could be planned: {unplanned}{instead}")
        self._planning_seconds = time.monotonic() - began
        cuts = (kind for kind in roster.techniques() if kind.slot is Slot.BATCHING)
        uncut = next(filter(None, (kind.planning_objection(self.job) for kind in cuts)), "")
        reason = f" (the batch cannot be cut: {uncut})" if uncut else ""
        if chosen is None and exhausted.phase != STEP_BOUNDARY:
            raise out_of_memory(
                exhausted, recipe, step, f"There is no other recipe to try{reason}. {WHAT_TO_TRY}"
            )
        if chosen is None:
            event = f"Step {step}: memory is short ({exhausted.cause}, {exhausted.message}) under '{recipe}'"
            text = f"{event}, and there is no other recipe to try. The run continues, but slowly."
            self._journal.tell("warning", text=text)
        return chosen

    def compare_again(self, recipe: Recipe, steps: int, compare: Callable[[Job], Job]) -> None:
        """Compare the gradients of micro-batches and of the whole batch again, if `steps` is one of
        `RECHECK_STEPS`.

        A conclusive result is stored in `self.job`; an inconclusive one changes nothing.
        """
        before = self.job
        if not compares_again(before, recipe.setup(), steps) or (after := compare(before)).unclear_cut:
            return
        self.job = after
        for warning in cut_warning(after, recipe):
            self._journal.warn_once(warning["text"])

    def record_change(
        self, exhausted: Exhausted, before: Recipe, after: Recipe, step: int, **more: str | int
    ) -> None:
        """Write a change of the recipe, made before step `step`, as an event into the journal."""
        self._journal.tell(
            "replanned",
            step=step,
            cause=exhausted.cause,
            before=str(before),
            recipe=str(after),
            planning_seconds=round(self._planning_seconds, 3),
            **more,
        )
