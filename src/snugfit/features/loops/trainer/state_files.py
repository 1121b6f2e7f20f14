"""Files in a checkpoint of a Trainer under `fit`, beside weights and optimizer, and their loading.

    trainer_state.json    the Trainer's own: its log, the best metric, its callbacks.
    fit.json              missing in the Trainer's: losses since its last log, the position in the data.
                          Also the content of its last log line, and the pending work of the step's end.

A resumed run first repeats an abandoned evaluation. So the state that an evaluation changes is copied before
it: the Trainer's, its callbacks', and the random generators.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from snugfit.features.loops.loader import DataPosition, position_of
from snugfit.features.loops.trainer.live_trainer import logged_losses, restore_logged_losses
from snugfit.features.loops.trainer.trainer_hooks import StepEnd
from snugfit.training.checkpoint.state import as_written, restore_frozen, restore_rng
from snugfit.training.ranks import ALONE, Ranks
from snugfit.training.rng import all_rng_states, restore_all_rng_states

if TYPE_CHECKING:
    import torch

EXTRA_STATE = "fit.json"
TRAINER_STATE = "trainer_state.json"

OTHER_RANKS = "others"
"""Entry with the states of all processes but the first, by rank."""


@final
class StateFiles:
    """Writes and reads the training state of a checkpoint in addition to weights and optimizer, for one call
    of `train()`.
    """

    def __init__(self, trainer: Any, data: DataPosition, ranks: Ranks = ALONE) -> None:
        self._trainer, self._data, self._ranks = trainer, data, ranks
        self._before_evaluation: tuple[str, dict[str, Any]] | None = None
        self._rewound = ""
        self._abandoned: dict[str, bool] | None = None
        self._generators: dict[str, Any] | None = None
        self._restored = False
        self.folder: Path | None = None
        """Folder of the resumed checkpoint; None without one."""
        self.last_figures: StepEnd | None = None
        """Figures of the last step for the next log line; None before the first step."""

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._trainer.args.device
        return device

    # ---- saving ------------------------------------------------------------------------------------------

    def files(self, *, is_stopped: bool) -> dict[str, str]:
        """Return the content of the state files by name. With `is_stopped`, the run was stopped by a signal.

        All processes call it, and the first process gets the states of all.
        """
        trainer = self._trainer
        norm, learning_rate = self.last_figures or (None, None)
        ends = trainer.control.should_training_stop and trainer.state.global_step < trainer.state.max_steps
        rows = trainer.args.per_device_train_batch_size
        own = {**logged_losses(trainer), "data": self._data.to_json(rows)}
        from_others = self._ranks.gather(own)[1:]
        extra = {
            **own,
            **({OTHER_RANKS: from_others} if from_others else {}),
            "figures": [None if norm is None else float(norm), learning_rate],
            "unevaluated": self._abandoned,
            "ends": bool(ends and not is_stopped),
        }
        state = self._rewound or self._state_text()
        return {TRAINER_STATE: state, EXTRA_STATE: json.dumps(extra) + "\n"}

    def _state_text(self) -> str:
        _note_callbacks(self._trainer)
        return json.dumps(asdict(self._trainer.state), indent=2, sort_keys=True) + "\n"

    def note_before_evaluation(self) -> None:
        """Copy the values of the trainer's state that an evaluation changes, before it starts."""
        # The Trainer only sometimes adds its count of operations to its state.
        self._trainer.store_flos()
        self._before_evaluation = self._state_text(), all_rng_states(self._device)

    def rewind_evaluation(self) -> None:
        """Restore the trainer's state from before an interrupted evaluation, so that the next checkpoint
        contains it.
        """
        assert self._before_evaluation is not None
        self._rewound, generators = self._before_evaluation
        restore_all_rng_states(generators, self._device)
        self._abandoned = {"save": bool(self._trainer.control.should_save)}

    # ---- resuming ----------------------------------------------------------------------------------------

    @cached_property
    def _extra_state(self) -> dict[str, Any]:
        """Return the run's state that the Trainer's own state file does not contain."""
        if self.folder is None:
            return {}
        rows = self._trainer.args.per_device_train_batch_size
        with as_written(self.folder):
            extra: dict[str, Any] = json.loads((self.folder / EXTRA_STATE).read_text(encoding="utf-8"))
            after_first = extra.get(OTHER_RANKS, [])
            processes = 1 + len(after_first)
            if processes != self._ranks.size:  # continue from the first one's position
                extra["loss"] = sum(state["loss"] for state in (extra, *after_first)) / processes
            elif self._ranks.rank:
                extra |= after_first[self._ranks.rank - 1]
            if (extra["data"]["rows"], processes) != (rows, self._ranks.size):
                extra["data"]["last"] = None  # batches have another size now
            extra["processes"] = processes
        return extra

    @property
    def position(self) -> tuple[int, int] | None:
        """Epoch of the resumed checkpoint and its number of trained batches; None in a new run."""
        if self.folder is None:
            return None
        extra, rows = self._extra_state, self._trainer.args.per_device_train_batch_size
        return position_of(extra["data"], rows, more=Fraction(extra["processes"], self._ranks.size))

    @property
    def unevaluated(self) -> dict[str, Any] | None:
        """The interrupted evaluation in the resumed checkpoint, with the logging and saving that follow it.
        None without one.
        """
        pending: dict[str, Any] | None = self._extra_state.get("unevaluated")
        return pending

    @property
    def ends(self) -> bool:
        """True if a callback ended the resumed run's training at this step, before its last step."""
        return bool(self._extra_state.get("ends"))

    @contextlib.contextmanager
    def train_begin_freezes_nothing(self) -> Iterator[None]:
        """Context in which callbacks at the start of training cannot change the frozen weights of a resumed
        run.

        The callbacks already ran when that run started, and its trained weights may have changed since.
        """
        from transformers import TrainerCallback

        state = self

        class RestoreFrozen(TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, *arguments: Any, **keywords: Any) -> None:
                """After the user's callbacks, freeze the same weights as in the resumed checkpoint."""
                if state.folder is not None:
                    restore_frozen(state._trainer.model, state.folder)

        callback = RestoreFrozen()
        # A callback that is added last runs after those of the user.
        self._trainer.add_callback(callback)
        try:
            yield
        finally:
            self._trainer.remove_callback(callback)

    def restore(self) -> dict[str, Any] | None:
        """At the start of the first epoch after a resume, restore the state that the Trainer does not.

        Return the position in the data; None in any other epoch.
        """
        if self.folder is None or self._restored:
            return None
        self._restored = True
        self.last_figures = StepEnd(*self._extra_state.get("figures") or (None, None))
        restore_logged_losses(self._trainer, self._extra_state)
        self._restore_rng(self.folder)
        if self.position is None or self.position[1]:  # the start of an epoch may freeze and unfreeze weights
            restore_frozen(self._trainer.model, self.folder)
        data: dict[str, Any] = self._extra_state["data"]
        return data

    def note_generators(self) -> None:
        """Store the current random states, for a resumed run to restore instead of those in the
        checkpoint.
        """
        self._generators = all_rng_states(self._device)

    def restore_generators(self, folder: Path) -> None:
        """Restore the stored random states of the model for a resumed run."""
        if self._generators is None:
            self._restore_rng(folder)
        else:
            restore_all_rng_states(self._generators, self._device)

    def _restore_rng(self, folder: Path) -> None:
        """Restore this process's random generators, if the checkpoint has states for them."""
        if self._ranks.rank < self._extra_state.get("processes", self._ranks.size):
            restore_rng(folder, self._device, self._ranks.rank)


def check_trainer_state(folder: Path) -> None:
    """Check the Trainer's own state file before the Trainer reads it. Raises `SnugfitError` for an invalid
    one.
    """
    from transformers import TrainerState

    with as_written(folder):
        TrainerState.load_from_json(str(folder / TRAINER_STATE))


def _note_callbacks(trainer: Any) -> None:
    """Store the state of stateful callbacks in the Trainer's own, as the Trainer does."""
    from transformers.trainer_callback import ExportableState

    states: dict[str, list[Any]] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            states.setdefault(type(callback).__name__, []).append(callback.state())
    for name, parts in states.items():
        trainer.state.stateful_callbacks[name] = parts if len(parts) > 1 else parts[0]
