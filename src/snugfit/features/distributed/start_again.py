"""Restart of all processes under a recipe that needs less memory, after one of several processes ran out of
it.

A run of one process drops the step's gradients and continues (`session.py`). With several, the one without
memory cannot. The others wait in the middle of an exchange with it, in the forward or the backward pass. To
end their wait, their groups would have to be aborted and created again. NCCL can abort kernels that wait on
the device. But no library documents the state of DDP's buckets, FSDP2's hooks and its streams after such a
step. The solution is therefore the tested one, that of a process that dies:

1. The process writes the recipe, the phase and the cause to `out-of-memory.json` in the run's folder, and
   ends with `MemoryRanOut`. The others end because it has ended.
2. All start again: by the launcher of `--gpus N`, or under torchrun by the user.
3. The newest whole checkpoint is read. The first process chooses the next recipe for all, as in a run of one
   process (`recovery.py`).

Steps since that checkpoint are repeated, with the same samples and random numbers; the other recipe has the
same mathematics. The record is valid until a checkpoint of the next recipe exists. A process that is killed
before that loses nothing of it. It is valid for the same job, recipe and number of GPUs alone, and not for a
run that begins anew.
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
    """Error: memory ran out in one of several processes; the same command continues with a smaller recipe."""

    can_start_again: ClassVar = True


@dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """The record of a run of several processes whose memory ran out."""

    run: dict[str, Any]
    """Job, requested recipe, and number of GPUs of the run."""

    recipes: tuple[str, ...]
    """Recipes that ran out of memory since the newest checkpoint, in order."""

    step: int
    """Number of the step that ran out of memory, counted from 1."""

    rank: int
    """Rank of the process that ran out of memory."""

    cause: str
    phase: str
    message: str

    @property
    def exhausted(self) -> Exhausted:
        """The failed step of this process, as `Exhausted`: its recipe, phase and error."""
        return Exhausted(cause=self.cause, phase=self.phase, message=self.message)

    @property
    def recipe(self) -> Recipe:
        """The recipe whose step ran out of memory."""
        return Recipe.parse(self.recipes[-1])

    def next_recipe(self, run: Run, recovery: Recovery) -> Recipe:
        """Return the recipe to continue with; only the first process calls it.

        Raises `OutOfMemory` if none is left, and removes the record: with more memory the next start tries
        again.
        """
        exhausted, before, step = self.exhausted, self.recipe, self.step - 1
        try:
            chosen = recovery.next_recipe(exhausted, before, step)
            if chosen is None or str(chosen) in self.recipes:
                raise out_of_memory(
                    exhausted, before, step, f"There is no other recipe to try. {WHAT_TO_TRY}"
                )
        except OutOfMemory:
            forget(run.folder)
            raise
        return chosen

    @classmethod
    def of(cls, run: Run, exhausted: Exhausted, recipe: Recipe, step: int) -> Self:
        """Return the record of this process's failure in the step after `step`."""
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
    """Write the record that this process ran out of memory after `step` steps; return the error that ends the
    process.

    `before` is the record of the run's previous failure, or None.
    """
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
    """Return the record of this run if the recipe that it would use next ran out of memory, else None.

    A record that is no longer valid is removed.
    """
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
    """Remove the record of exhausted memory (`out-of-memory.json`) from the run's folder."""
    with suppress(OSError):
        (folder / RECORD).unlink(missing_ok=True)


def _same(run: Run) -> dict[str, Any]:
    """Return the fields of a run that must equal those in a record for the record to apply."""
    about = {"job": run.job.to_json(), "asked": str(run.recipe), "gpus": run.ranks.size}
    read: dict[str, Any] = json.loads(json.dumps(about))
    return read
