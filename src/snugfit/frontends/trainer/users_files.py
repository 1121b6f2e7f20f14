"""What a user's own subclass of Trainer puts into its checkpoints.

A subclass may override `_save`, `save_model` or `_save_checkpoint`: sentence-transformers writes what its
models are made of, TRL a model's card. Such methods know the folder `output_dir/checkpoint-N` and write there
at once. Here they are called while `output_dir` is a draft that no reader sees (its last part keeps the name
of the real one), and what they have written is then kept with the run's own files: under one manifest, and
shown by one rename. What they write beside the checkpoint goes to the real `output_dir`.

Whoever writes a model's weights himself may write them as he likes; those that the run resumes from are then
kept in a folder of their own.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.step.trainer_hooks import overrides
from snugfit.training.checkpoint.model_state import has_model_state
from snugfit.training.checkpoint.save_failed import why

if TYPE_CHECKING:
    from snugfit.training.checkpoint.state import Snapshot

OWN_WEIGHTS = "snugfit"
"""The folder within a checkpoint for the run's weights, where the user's subclass writes weights too."""

SAVES_MODEL = ("_save", "save_model")


def weights_folder(checkpoint: Path) -> Path:
    """Where the weights of a fitted trainer's checkpoint are."""
    own = checkpoint / OWN_WEIGHTS  # or an adapter of that name, beside the model's state
    return own if own.is_dir() and not has_model_state(checkpoint) else checkpoint


@dataclass(frozen=True, kw_only=True)
class CollectedFiles:
    """The files of a checkpoint, written into a draft by the run and the user's subclass."""

    step: int
    """The optimizer steps that are done."""

    bytes: int
    """How much room the run's own files take."""

    draft: Path
    """It goes when its files have been moved."""

    files: Path
    """The folder within the draft that becomes the checkpoint."""

    fault: Exception | None = None
    """What the system refused when they were written."""

    def write(self, folder: Path) -> None:
        """Moves them into `folder`, on the same file system. Raises what was refused before."""
        try:
            if self.fault is not None:
                raise self.fault
            for path in self.files.iterdir():
                path.rename(folder / path.name)
        finally:
            shutil.rmtree(self.draft, ignore_errors=True)


class UsersFiles:
    """Calls the saving methods of one trainer's subclass, and collects what they write."""

    def __init__(self, trainer: Any, root: Path) -> None:
        self._trainer, self._root = trainer, root
        self.any = overrides(trainer, *SAVES_MODEL, "_save_checkpoint")
        """Whether it has such methods."""

        self.weights = overrides(trainer, *SAVES_MODEL)
        """Whether they write the model."""

        self._write: Callable[[], None] | None = None

    def collect(self, draft: Path, snapshot: Snapshot, save: Callable[[], None]) -> CollectedFiles:
        """What the user's `save` writes into the checkpoint of this snapshot, with the snapshot's files.
        Raises what goes wrong in it, but for what the system refuses: that is for whoever keeps the files."""
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
            args.output_dir = str(beside)
            save()
            self.write_own()
        except Exception as fault:
            if why(fault, files) is None:
                shutil.rmtree(draft, ignore_errors=True)
                raise
            return CollectedFiles(**collected, fault=fault)
        finally:
            args.output_dir = output_dir
        for path in beside.iterdir():
            if path != files:
                _move_into(path, self._root)
        return CollectedFiles(**collected)

    def write_own(self) -> None:
        """Where the user's methods end, in `super()._save_checkpoint()`: the run's own files, once."""
        write, self._write = self._write, None
        if write is not None:
            write()

    def _write_own(self, snapshot: Snapshot, files: Path) -> None:
        if self.weights:
            self._trainer.save_model(str(files), _internal_call=True)
            snapshot = replace(snapshot, weights_folder=OWN_WEIGHTS, processing=None)
        snapshot.write(files)


def _move_into(path: Path, folder: Path) -> None:
    """Moves a file or a folder, over what has its name."""
    if path.is_dir() and (folder / path.name).is_dir():
        for inner in path.iterdir():
            _move_into(inner, folder / path.name)
    else:
        path.replace(folder / path.name)
