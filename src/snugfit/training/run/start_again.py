"""Memory ran out in one of several processes: all of them start again, under a recipe that needs less.

A run of one process drops the step's gradients and goes on where it is (`session.py`). With several the one
that is short of memory cannot: the others stand in the middle of an exchange with it, in the forward or the
backward pass, and wait. To get them out their groups would have to be aborted and made anew. With NCCL that
works on kernels that wait on the device, and what is left of DDP's buckets, FSDP2's hooks and its streams
after such a step is nowhere promised. So the way is the one that is tested anyhow, that of a process that
dies:

    1. the process writes down in the run's folder which recipe ran out of memory, where and why
       (`out-of-memory.json`), and ends with `MemoryRanOut`; the others end because it has
    2. all start again: by the launcher of `--gpus N`, or under torchrun by the user
    3. the newest whole checkpoint is read, and the first process decides for all with which recipe the run
       goes on, as a run of one process does (`recovery.py`)

Steps since that checkpoint are taken once more, with the same samples and random numbers; under the other
recipe they are the same mathematics. What is written down counts until there is a checkpoint of the recipe
that followed, which says so itself; a process that is killed before that loses nothing of it. It counts for
the same job, recipe and number of GPUs alone, and not for a run that begins anew.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from snugfit.documents import BadDocument, decode_fields, encode_fields, read_document, write_document
from snugfit.errors import OutOfMemory, SnugfitError
from snugfit.techniques.recipe import Recipe
from snugfit.training.recovery import WHAT_TO_TRY, Exhausted, out_of_memory

if TYPE_CHECKING:
    from snugfit.training.checkpoint.manifest import Checkpoint
    from snugfit.training.recovery import Recovery
    from snugfit.training.run.run import Run

RECORD = "out-of-memory.json"

START_AGAIN = (
    "All processes have to start again. Give the same command once more, without --restart (from Python "
    "restart=True): the run continues from its last checkpoint, under a recipe that needs less memory."
)


class MemoryRanOut(OutOfMemory):
    """Memory ran out in one of several processes, and the same command goes on with less."""

    can_start_again: ClassVar = True


@dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """What is written down of a run of several processes whose memory ran out."""

    run: dict[str, Any]
    """Its job, the recipe that was asked for, and how many GPUs there are."""

    recipes: tuple[str, ...]
    """Recipes that were tried since its newest checkpoint was written, the last one last."""

    step: int
    """The step that was not made, from 1."""

    rank: int
    """The number of the process."""

    cause: str
    phase: str
    message: str

    @property
    def exhausted(self) -> Exhausted:
        """What the process found."""
        return Exhausted(cause=self.cause, phase=self.phase, message=self.message)

    @property
    def recipe(self) -> Recipe:
        """The recipe that memory ran out under."""
        return Recipe.parse(self.recipes[-1])

    @classmethod
    def of(cls, run: Run, exhausted: Exhausted, recipe: Recipe, step: int) -> Self:
        """What this process finds in the step after `step`."""
        return cls(
            run=_same(run),
            recipes=(str(recipe),),
            step=step + 1,
            rank=run.ranks.rank,
            cause=exhausted.cause,
            phase=exhausted.phase,
            message=exhausted.message,
        )


def end_of_several(
    run: Run, exhausted: Exhausted, recipe: Recipe, step: int, before: MemoryRecord | None
) -> OutOfMemory:
    """Writes down that memory ran out in this process after so many steps, under `recipe`, in a run that was
    started after the end `before`; gives the error to end with."""
    record = MemoryRecord.of(run, exhausted, recipe, step)
    tried = before.recipes if before is not None else ()
    document = encode_fields(record, recipes=[*(one for one in tried if one != str(recipe)), str(recipe)])
    text = f"It was rank {run.ranks.rank}."
    try:
        write_document(run.folder / RECORD, document)
    except OSError as refusal:
        return out_of_memory(
            exhausted, recipe, step, f"{text} {RECORD} cannot be written ({refusal.strerror}). {WHAT_TO_TRY}"
        )
    return MemoryRanOut(str(out_of_memory(exhausted, recipe, step, f"{text} {START_AGAIN}")))


def record_of(run: Run, checkpoint: Checkpoint | None) -> MemoryRecord | None:
    """What is written down of this run, if it is to go on from this checkpoint, or begin, under a recipe that
    ran out of memory. What counts no longer is removed."""
    file = run.folder / RECORD
    try:
        record = decode_fields(MemoryRecord, read_document(file))
        _ = record.recipe
    except FileNotFoundError:
        return None
    except (BadDocument, SnugfitError, KeyError, TypeError, ValueError, IndexError):
        forget(run.folder)
        return None
    now = run.recipe if checkpoint is None else run.recipe_after(checkpoint.about)
    if record.run != _same(run) or str(now) not in record.recipes:
        forget(run.folder)
        return None
    return record


def forget(folder: Path) -> None:
    """Removes what is written down."""
    with suppress(OSError):
        (folder / RECORD).unlink(missing_ok=True)


def recipe_to_go_on_with(run: Run, recovery: Recovery, record: MemoryRecord) -> Recipe:
    """In the first process: the recipe that follows. Raises `OutOfMemory` where none is left, and nothing
    stays written down: with more memory the next start tries once more."""
    exhausted, before, step = record.exhausted, record.recipe, record.step - 1
    try:
        chosen = recovery.next_recipe(exhausted, before, step)
        if chosen is None or str(chosen) in record.recipes:
            raise out_of_memory(exhausted, before, step, f"There is no other recipe to try. {WHAT_TO_TRY}")
    except OutOfMemory:
        forget(run.folder)
        raise
    return chosen


def _same(run: Run) -> dict[str, Any]:
    """What has to be the same where a run goes on after its memory ran out."""
    about = {"job": run.job.to_json(), "asked": str(run.recipe), "gpus": run.ranks.size}
    read: dict[str, Any] = json.loads(json.dumps(about))
    return read
