"""Files that a user's own subclass of Trainer adds to its checkpoints.

A subclass may override `_save`, `save_model` or `_save_checkpoint`: sentence-transformers writes the parts of
its models, TRL a model card. Such methods write into the folder `output_dir/checkpoint-N` directly. Here they
are called while `output_dir` is a hidden temporary folder. Its last part is the name of the real folder.
Their files are then stored with snugfit's files, listed in one manifest, and renamed atomically. Files
outside the checkpoint go to the real `output_dir`.

A subclass may write a model's weights in any form. The weights for resuming the run are then stored in a
folder of their own.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.features.loops.trainer.trainer_hooks import overrides
from snugfit.training.checkpoint.model_state import has_model_state
from snugfit.training.checkpoint.save_failed import failure_cause

if TYPE_CHECKING:
    from snugfit.training.checkpoint.state import Snapshot

OWN_WEIGHTS = "snugfit"
"""Folder in a checkpoint for the run's weights, if the user's subclass of the trainer also writes weights."""

SAVES_MODEL = ("_save", "save_model")


def weights_folder(checkpoint: Path) -> Path:
    """Return the folder of the weights in a checkpoint of a Trainer under `fit`."""
    own = checkpoint / OWN_WEIGHTS  # or an adapter with this name, next to the model's state
    return own if own.is_dir() and not has_model_state(checkpoint) else checkpoint


@dataclass(frozen=True, kw_only=True)
class CollectedFiles:
    """The files of a checkpoint in a temporary folder, written by snugfit and the user's Trainer subclass."""

    step: int
    """Number of finished optimizer steps at the checkpoint."""

    bytes: int
    """Bytes of the files that snugfit itself writes."""

    draft: Path
    """Temporary folder, deleted after its files have been moved."""

    files: Path
    """Folder within `draft` that becomes the checkpoint."""

    fault: Exception | None = None
    """Operating system's error during the writes; None without one."""

    def write(self, folder: Path) -> None:
        """Move the files into `folder`, on the same file system. Raises the error `fault` that occurred when
        they were collected.
        """
        try:
            if self.fault is not None:
                raise self.fault
            for path in self.files.iterdir():
                path.rename(folder / path.name)
        finally:
            shutil.rmtree(self.draft, ignore_errors=True)


class UsersFiles:
    """Calls the saving methods of a user's Trainer subclass, and collects their files."""

    def __init__(self, trainer: Any, root: Path) -> None:
        self._trainer, self._root = trainer, root
        self.any = overrides(trainer, *SAVES_MODEL, "_save_checkpoint")
        """True if the user's subclass overrides a method that saves checkpoints."""

        self.weights = overrides(trainer, *SAVES_MODEL)
        """True if the user's subclass overrides a method that saves the model's weights."""

        self._write: Callable[[], None] | None = None

    def collect(self, draft: Path, snapshot: Snapshot, save: Callable[[], None]) -> CollectedFiles:
        """Call the user's `save` in the temporary folder `draft`. Return its files, together with those of
        the snapshot.

        Raises errors of `save`, except the operating system's: these are stored in `fault` and raised by
        `write`.
        """
        args, output_dir = self._trainer.args, self._trainer.args.output_dir
        beside = draft / self._root.name
        files = beside / f"checkpoint-{snapshot.step}"
        collected: dict[str, Any] = {
            "step": snapshot.step,
            "bytes": snapshot.bytes,
            "draft": draft,
            "files": files,
        }
        try:
            files.mkdir(parents=True)
            self._write = lambda: self._write_own(snapshot, files)
            # The user's methods write to this folder, which is temporarily the draft.
            args.output_dir = str(beside)
            save()
            self.write_files()
        except Exception as fault:
            if failure_cause(fault, files) is None:
                shutil.rmtree(draft, ignore_errors=True)
                raise
            return CollectedFiles(**collected, fault=fault)
        finally:
            args.output_dir = output_dir
        # Files that the user writes next to the checkpoint belong in the real output folder.
        for path in beside.iterdir():
            if path != files:
                _move_into(path, self._root)
        return CollectedFiles(**collected)

    def write_files(self) -> None:
        """Write snugfit's checkpoint files, once, when the user's method calls
        `super()._save_checkpoint()`.
        """
        write, self._write = self._write, None
        if write is not None:
            write()

    def _write_own(self, snapshot: Snapshot, files: Path) -> None:
        if self.weights:
            self._trainer.save_model(str(files), _internal_call=True)
            snapshot = replace(snapshot, weights_folder=OWN_WEIGHTS, processing=None)
        snapshot.write(files)


def _move_into(path: Path, folder: Path) -> None:
    """Move a file or a folder, and replace files of the same name."""
    if path.is_dir() and (folder / path.name).is_dir():
        for inner in path.iterdir():
            _move_into(inner, folder / path.name)
    else:
        path.replace(folder / path.name)
