"""Checkpoints and folder of a hand-written loop's run.

    checkpoint-N/     config.json and model.safetensors, or the adapters' files
                      state.json, state.safetensors    optimizer, schedule, scaler, random generators
                      hand.json                        position in the data

`RunFolder` locks the folder, and `RunCheckpoints` saves and resumes the run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from snugfit.features.loops.custom_loop.batches import Batches
from snugfit.features.loops.same_run import refuse_another_run
from snugfit.features.loops.users_optimizer import optimizer_facts, schedule_facts
from snugfit.training.checkpoint.code_facts import code_facts
from snugfit.training.checkpoint.facts import FACTS, forward_facts, model_facts
from snugfit.training.checkpoint.lock import LOCK
from snugfit.training.checkpoint.manager import CheckpointManager, open_store
from snugfit.training.checkpoint.state import TrainState, as_written, check_packable, restore, snapshot
from snugfit.training.checkpoint.weights import load_weights
from snugfit.training.interrupt import Interrupts
from snugfit.versions import versions

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe
    from snugfit.training.journal import Journal

DATA_POSITION = "hand.json"
COMPARED_IN_PARTS = ("recipe", "versions", FACTS)
"""Entries of a run's description whose parts are compared one by one on resuming."""

CURE = " Name another output_dir, or leave resume() out: then the old checkpoints are renamed."


@final
class RunFolder:
    """The locked output folder of one run, and its handling of stop signals, until it is closed."""

    def __init__(self, folder: Path) -> None:
        # The deepest folder comes first, so that each folder is empty when it is removed.
        above = [folder.absolute(), *folder.absolute().parents]
        self._made = [path for path in above if not os.path.lexists(path)]
        self._open = contextlib.ExitStack()
        self.store = self._open.enter_context(open_store(folder, begin_anew="without resume()"))
        # The stack closes in reverse order, so that the lock's file is removed while it is locked.
        self._open.callback(self._remove_unused)
        self.interrupts = self._open.enter_context(Interrupts(self.store.root))
        """Stop signals, and the trigger file that requests a checkpoint."""

    def close(self) -> None:
        """Unlock the output folder. Remove it if it was created for this run and contains no files."""
        self._open.close()

    def _remove_unused(self) -> None:
        """Remove the folders that were created for this run, if they contain only the lock file."""
        with contextlib.suppress(OSError):
            if self._made and [path.name for path in self.store.root.iterdir()] == [LOCK]:
                (self.store.root / LOCK).unlink()
                for path in self._made:
                    path.rmdir()


@final
class RunCheckpoints:
    """Saves a run's checkpoints in its output folder, and resumes the run from them."""

    def __init__(
        self,
        folder: RunFolder,
        journal: Journal,
        *,
        job: Job,
        recipe: Recipe,
        state: TrainState,
        batches: Batches,
        save_total_limit: int | None,
        code: Mapping[str, Any] | None,
    ) -> None:
        self._folder, self._state, self._batches = folder, state, batches
        self.root, self.interrupts = folder.store.root, folder.interrupts
        self.journal = journal
        self._manager = CheckpointManager(folder.store, journal, state.device, limit=save_total_limit)
        self._manager.about = _about(job, recipe, state, batches, code)
        check_packable(state)
        self._manager.prepare(state)
        self._begun = self._closed = False
        self.repeated_loss: float | None = None
        """Loss of the last step before the resume, if that step is repeated; None otherwise."""

    def begin(self) -> None:
        """Rename earlier checkpoints in the folder, unless the run was resumed from one of them."""
        if not self._begun:
            self._begun = True
            self._manager.set_aside_earlier()

    def check_first_update(self) -> None:
        """After the first update, raise `SnugfitError` for optimizer states that no checkpoint can store."""
        self._manager.check_first_update(lambda: self._state)

    def save(self, *, repeated_loss: float | None = None) -> None:
        """Save a checkpoint of this step, unless one exists. It is written while the next steps run.

        If `repeated_loss` is given, a resumed run yields the last batch again and returns this loss without
        training.
        """
        self.begin()
        batches = self._batches.to_json(repeating=repeated_loss is not None)
        if repeated_loss is not None:  # replaces a checkpoint that the loop saved for this step
            self._manager.saved_step = None
        position = json.dumps({**batches, "repeated_loss": repeated_loss}) + "\n"
        self._manager.save(
            self._state.progress.step,
            lambda staging: snapshot(self._state, staging, files={DATA_POSITION: position}),
        )

    def resume(self, named: Path | None) -> bool:
        """Restore the newest complete checkpoint, or the named one. Return False if there is no checkpoint.

        Raises `UsageError` for another run's checkpoint.
        """
        checkpoint = (
            self._manager.newest() if named is None else self._manager.checkpoint_at(named, in_store=True)
        )
        if checkpoint is None:
            return False
        now = self._manager.about
        names = [name for name in now if name not in COMPARED_IN_PARTS]
        refuse_another_run(self._manager, checkpoint, now, names=names, recipe="recipe", cure=CURE)
        if named is not None:
            self._manager.discard_later(checkpoint)
        load_weights(self._state.model, checkpoint.folder)
        restore(self._state, checkpoint.folder)
        with as_written(checkpoint.folder):
            position = json.loads((checkpoint.folder / DATA_POSITION).read_text(encoding="utf-8"))
            self._batches.resume(position)
        self.repeated_loss = position.get("repeated_loss")
        # A resumed run continues these checkpoints, so `begin` must not rename them away.
        self._manager.saved_step, self._begun = checkpoint.step, True
        self.journal.tell("note", text=f"The run continues after step {checkpoint.step:,}.")
        return True

    def wait(self) -> None:
        """Block until all checkpoints are written."""
        self._manager.wait()

    def close(self) -> None:
        """Finish writing the last checkpoint and unlock the folder. Raises `SnugfitError` when writing
        failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
            self._manager.raise_if_last_failed()
        finally:
            self._folder.close()


def _about(
    job: Job, recipe: Recipe, state: TrainState, batches: Batches, code: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the description of the run that each checkpoint stores. `code` maps names to functions whose
    source a resume compares.
    """
    import torch

    groups = state.optimizer.param_groups
    return {
        "door": "accelerate",
        "model": type(state.model).__name__,
        "parameters": sum(weight.numel() for weight in state.model.parameters()),
        "optimizer": type(state.optimizer).__name__,
        "learning_rates": [float(group.get("initial_lr", group["lr"])) for group in groups],
        "weight_decays": [float(group.get("weight_decay") or 0.0) for group in groups],
        "samples": batches.samples,
        "batch_size": job.batch_size,
        "clip": job.clip,
        "seed": torch.initial_seed(),
        "recipe": str(recipe),
        "versions": versions(),
        FACTS: {
            **model_facts(state.model),
            **optimizer_facts(state.optimizer),
            **schedule_facts(state.scheduler),
            **batches.facts(),
            **(code_facts(code) | forward_facts(state.model) if code is not None else {}),
        },
    }
