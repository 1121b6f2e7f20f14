"""The checkpoints of a hand-written loop's run, and its folder.

checkpoint-N/     config.json and model.safetensors, or the adapters'
                  state.json, state.safetensors    optimizer, schedule, scaler, random generators
                  hand.json                        where the run was in its data
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from snugfit.errors import SnugfitError, UsageError
from snugfit.frontends.custom_loop.batches import Batches
from snugfit.frontends.trainer.checkpoints import Kept
from snugfit.frontends.trainer.restore import restore_weights
from snugfit.training.checkpoint.lock import hold_folder
from snugfit.training.checkpoint.saver import Saver
from snugfit.training.checkpoint.staging import Staging
from snugfit.training.checkpoint.state import Running, bytes_of, restore, snapshot
from snugfit.training.checkpoint.store import Store
from snugfit.training.interrupt import Interrupts
from snugfit.training.journal import Event, Journal
from snugfit.versions import versions

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe
    from snugfit.training.checkpoint.manifest import Checkpoint

WHERE = "hand.json"
FREE = ("recipe", "versions")
"""What may differ when a run is taken up; its numbers are then no longer the same bit for bit."""


@final
class HeldFolder:
    """A folder that is one run's alone until it is closed."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        self.store.prepare()
        self._open = contextlib.ExitStack()
        self._open.enter_context(hold_folder(self.store.root))
        self.interrupts = self._open.enter_context(Interrupts(self.store.root))
        """Signals and the trigger file."""

        self.store.sweep()

    def close(self) -> None:
        """Gives it back."""
        self._open.close()


@final
class HandKeeping:
    """One run's."""

    def __init__(
        self,
        held: HeldFolder,
        *,
        job: Job,
        recipe: Recipe,
        running: Running,
        batches: Batches,
        save_total_limit: int | None,
        watch: Callable[[Event], None],
    ) -> None:
        self._running, self._batches = running, batches
        self._held, self._store, self.interrupts = held, held.store, held.interrupts
        self.root = self._store.root
        """The folder."""

        self.journal = Journal(self.root, watch)
        """What happened."""

        self._about = _about(job, recipe, running, batches)
        self._staging = Staging(running.device)
        self._staging.prepare(bytes_of(running))
        self._saver = Saver(self._store, self._about, self.journal, limit=save_total_limit)
        self._kept_step: int | None = None
        self._begun = self._closed = False

    def begin(self) -> None:
        """A run that was not resumed begins anew: what stands in its folder is put aside."""
        if self._begun:
            return
        self._begun = True
        for moved in self._store.restart():
            self.journal.tell("warning", text=f"An earlier run's checkpoint is kept as {moved.name}.")

    def keep(self) -> None:
        """A checkpoint of this border, unless there is one; it is written while the next steps run."""
        self.begin()
        step = self._running.progress.step
        if self._kept_step != step:
            self._saver.keep(self._taken, best=None)
            self._kept_step = step

    def _taken(self) -> Kept:
        where = json.dumps(self._batches.to_json()) + "\n"
        return Kept(run=snapshot(self._running, self._staging), files={WHERE: where}, processing=None)

    def resume(self) -> bool:
        """Makes the run the one of the newest whole checkpoint; False where there is none."""
        kept = self._store.newest()
        for broken in self._store.broken:
            self.journal.tell("warning", text=f"passed over {broken}")
        if kept is None:
            return False
        self._refuse_another(kept)
        restore_weights(self._running.model, kept.folder)
        restore(self._running, kept.folder)
        self._batches.resume(json.loads((kept.folder / WHERE).read_text(encoding="utf-8")))
        self._kept_step, self._begun = kept.step, True
        self.journal.tell("note", text=f"The run goes on after step {kept.step:,}.")
        return True

    def _refuse_another(self, kept: Checkpoint) -> None:
        """Raises `UsageError` when a checkpoint is another run's; says what only keeps the numbers from being
        the same bit for bit."""
        now, was = self._about, kept.about
        differ = {
            name: f"{name} was {was.get(name)} and is {now[name]}"
            for name in now
            if was.get(name) != now[name]
        }
        if wrong := [text for name, text in differ.items() if name not in FREE]:
            raise UsageError(
                f"{kept.folder} is a checkpoint of another run: {'; '.join(wrong)}. Name another output_dir,"
                " or leave resume() out: then the old checkpoints are put aside."
            )
        for text in differ.values():
            self.journal.tell("warning", text=f"{text}: the run goes on, and no longer bit for bit")

    def wait(self) -> None:
        """Until nothing is being written; not beyond a signal's deadline."""
        self._saver.wait(stop=lambda: self.interrupts.too_late)

    def close(self) -> None:
        """Waits until the last checkpoint is written, and gives the folder back. Raises `SnugfitError` when
        it could not be kept."""
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
            if self._saver.failure is not None:
                raise SnugfitError(f"The last checkpoint is not kept: {self._saver.failure}")
        finally:
            self._held.close()


def _about(job: Job, recipe: Recipe, running: Running, batches: Batches) -> dict[str, Any]:
    """What every checkpoint says of its run, as it began."""
    groups = running.optimizer.param_groups
    return {
        "door": "accelerate",
        "model": type(running.model).__name__,
        "parameters": sum(each.numel() for each in running.model.parameters()),
        "optimizer": type(running.optimizer).__name__,
        "learning_rates": [float(group.get("initial_lr", group["lr"])) for group in groups],
        "weight_decays": [float(group.get("weight_decay") or 0.0) for group in groups],
        "samples": batches.samples,
        "batch_size": job.batch_size,
        "clip": job.clip,
        "recipe": str(recipe),
        "versions": versions(),
    }
