"""The checkpoints of a hand-written loop's run, and its folder.

checkpoint-N/     config.json and model.safetensors, or the adapters'
                  state.json, state.safetensors    optimizer, schedule, scaler, random generators
                  hand.json                        where the run was in its data
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from snugfit.frontends.custom_loop.batches import Batches
from snugfit.frontends.same_run import refuse_another_run
from snugfit.training.checkpoint.code_facts import code_facts
from snugfit.training.checkpoint.facts import (
    FACTS,
    forward_facts,
    model_facts,
    optimizer_facts,
    schedule_facts,
)
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
NOT_COMPARED_AS_THEY_ARE = ("recipe", "versions", FACTS)
"""What a checkpoint says of its run and is compared by parts."""

CURE = " Name another output_dir, or leave resume() out: then the old checkpoints are renamed."


@final
class RunFolder:
    """A folder that is one run's alone until it is closed."""

    def __init__(self, folder: Path) -> None:
        above = [folder.absolute(), *folder.absolute().parents]
        self._made = [path for path in above if not os.path.lexists(path)]
        self._open = contextlib.ExitStack()
        self.store = self._open.enter_context(open_store(folder, begin_anew="without resume()"))
        self._open.callback(self._remove_unused)
        self.interrupts = self._open.enter_context(Interrupts(self.store.root))
        """Signals and the trigger file."""

    def close(self) -> None:
        """Gives the folder to whoever trains there next; one that was made for this run, and in which it has
        kept nothing, is gone."""
        self._open.close()

    def _remove_unused(self) -> None:
        """Of what was made for this run, the folders that are empty but for its lock."""
        with contextlib.suppress(OSError):
            if self._made and [path.name for path in self.store.root.iterdir()] == [LOCK]:
                (self.store.root / LOCK).unlink()
                for path in self._made:
                    path.rmdir()


@final
class RunCheckpoints:
    """Saves and resumes one run, in its folder."""

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
        self._begun = self._closed = self._is_update_checked = False
        self.repeated_loss: float | None = None
        """Of the step before a resume, where it is to be repeated."""

    def begin(self) -> None:
        """A run that was not resumed begins anew: what stands in its folder is put aside."""
        if not self._begun:
            self._begun = True
            self._manager.set_aside_earlier()

    def check_first_update(self) -> None:
        """After this process's first update, when the optimizer has its states. Raises `SnugfitError` for
        states that no checkpoint can hold."""
        if not self._is_update_checked:
            self._is_update_checked = True
            check_packable(self._state)

    def save(self, *, repeated_loss: float | None = None) -> None:
        """A checkpoint of this boundary, unless there is one; it is written while the next steps run. With
        the loss of the last step, that step is repeated when the run is resumed."""
        self.begin()
        batches = self._batches.to_json(repeating=repeated_loss is not None)
        if repeated_loss is not None:  # in the place of one that the loop has kept since
            self._manager.saved_step = None
        position = json.dumps({**batches, "repeated_loss": repeated_loss}) + "\n"
        self._manager.save(
            self._state.progress.step,
            lambda staging: snapshot(self._state, staging, files={DATA_POSITION: position}),
        )

    def resume(self, named: Path | None) -> bool:
        """Makes the run the one of the newest whole checkpoint, or of the one that is named; False where
        there is none. Raises `UsageError` for another run's."""
        checkpoint = (
            self._manager.newest() if named is None else self._manager.checkpoint_at(named, in_store=True)
        )
        if checkpoint is None:
            return False
        now = self._manager.about
        names = [name for name in now if name not in NOT_COMPARED_AS_THEY_ARE]
        refuse_another_run(self._manager, checkpoint, now, names=names, recipe="recipe", cure=CURE)
        if named is not None:
            self._manager.go_back_to(checkpoint)
        load_weights(self._state.model, checkpoint.folder)
        restore(self._state, checkpoint.folder)
        with as_written(checkpoint.folder):
            position = json.loads((checkpoint.folder / DATA_POSITION).read_text(encoding="utf-8"))
            self._batches.resume(position)
        self.repeated_loss = position.get("repeated_loss")
        self._manager.saved_step, self._begun = checkpoint.step, True
        self.journal.tell("note", text=f"The run continues after step {checkpoint.step:,}.")
        return True

    def wait(self) -> None:
        """Until nothing is being written."""
        self._manager.wait()

    def close(self) -> None:
        """Waits until the last checkpoint is written, and gives the folder back. Raises `SnugfitError` when
        it could not be kept."""
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
    """What every checkpoint says of its run, as it began; with the functions whose `code` is compared."""
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
