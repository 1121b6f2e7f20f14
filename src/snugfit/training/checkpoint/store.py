"""The store: a folder of checkpoints that always contains a complete one.

- `.lock`: names the process that writes here (`lock.py`).
- `.draft-30-5f0c91aa/`: a checkpoint that is being written; it is never read.
- `checkpoint-20/`: a whole checkpoint. It got this name after its last byte was on the disk.
- `checkpoint-10.broken/`: a checkpoint that was found damaged, and is never counted.
- `checkpoint-30.superseded/`: a checkpoint after the earlier one that a run has gone back to.

A checkpoint is written to a draft folder next to the final one, on the same file system, and then renamed.
First each file's checksum is computed, and the file is flushed to the disk. The manifest (list of files) is
next, then the draft's entries, the rename, and the entries of the parent folder. After a failure before the
rename, the next process that opens the store removes the draft. After a later failure, the checkpoint is
complete. For the same reason, a folder is renamed before it is removed. While a checkpoint is being replaced,
it has a hidden name.

The store handles files, not tensors. Only the process with the folder's lock calls its methods, one at a
time.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from snugfit.errors import SnugfitError, UsageError
from snugfit.training.checkpoint.manifest import (
    BrokenCheckpoint,
    Checkpoint,
    SaveStopped,
    check_sizes,
    seal,
    sync,
    verify,
)
from snugfit.training.checkpoint.save_failed import failure_cause, save_failed

_STEP = "(0|[1-9][0-9]*)"
_NAME = re.compile(f"checkpoint-{_STEP}")
_HIDDEN = re.compile(rf"\.(draft|gone|replaced)-{_STEP}-[0-9a-f]{{8}}")


class NoIntactCheckpoint(SnugfitError):
    """Error: every checkpoint in the folder is damaged."""


@dataclass(frozen=True, kw_only=True)
class DamagedCheckpoint:
    """A damaged checkpoint that a search for the newest one ignored."""

    step: int
    """Step number in the name of the checkpoint."""

    folder: Path
    """Path of the checkpoint's folder before it was renamed."""

    fault: str
    """Name of the damaged file, and the damage."""

    moved_to: Path
    """Path of the checkpoint's folder now. It was renamed, unless the file system is read-only."""

    def __str__(self) -> str:
        beside = f" (renamed to {self.moved_to.name})" if self.moved_to != self.folder else ""
        return f"{self.folder.name}: {self.fault}{beside}"


class Store:
    """The folder with the checkpoints of one run."""

    def __init__(self, root: Path, *, begin_anew: str = "with --restart") -> None:
        self.root, self._begin_anew = root.absolute(), begin_anew
        self.broken: list[DamagedCheckpoint] = []
        """Damaged checkpoints that `newest` skipped."""

    def prepare(self) -> None:
        """Create the folder, and try each operation of a save once, before the first step.

        Raises `UsageError` for a folder that cannot have checkpoints.
        """
        draft, shown = self._hidden_name("draft", 0), self._hidden_name("gone", 0)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            draft.mkdir()
            (draft / "trial").write_bytes(b".")
            sync(draft / "trial")
            sync(draft)
            draft.rename(shown)
            sync(self.root)
        except OSError as refusal:
            no_folder = isinstance(refusal, FileExistsError | NotADirectoryError)
            reason = "it is not a folder" if no_folder else refusal.strerror
            raise UsageError(
                f"{self.root}: checkpoints cannot be saved there ({reason}). Name another folder."
            ) from None
        finally:
            _remove(draft)
            _remove(shown)

    def sweep(self) -> list[Path]:
        """Remove the incomplete checkpoints of dead processes, and return the removed paths.

        A checkpoint whose replacement was interrupted gets its name back.
        """
        swept = []
        for path in sorted(self.root.iterdir()):
            if not (mark := _HIDDEN.fullmatch(path.name)):
                continue
            step, final = int(mark[2]), self._folder(int(mark[2]))
            # The replaced checkpoint is needed only if the new one is incomplete.
            if mark[1] != "replaced" or _is_complete(final, step):
                _remove(path)
                swept.append(path)
            # An incomplete new checkpoint keeps its name, and `newest` returns the replaced one.
            elif not os.path.lexists(final):
                path.rename(final)
        return swept

    def save(
        self,
        step: int,
        fill: Callable[[Path], None],
        about: Mapping[str, Any],
        *,
        needed_bytes: int | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Checkpoint:
        """Save the files that `fill` writes into its folder as the checkpoint of `step`, whole or not at all.

        An existing one of the same step is replaced. `about` may have any JSON values. Raises `SaveFailed` if
        the system refuses, and `SaveStopped` soon after `stop` returns True.
        """
        # Values that JSON cannot represent raise an error here, before any file is written.
        about = json.loads(json.dumps(dict(about), allow_nan=False))
        draft = self._hidden_name("draft", step)
        try:
            draft.mkdir()
            fill(draft)
            files = seal(draft, step, about, stop)
            if stop():
                raise SaveStopped(f"The save of step {step} was stopped. Earlier checkpoints are unchanged.")
            self._show(draft, step)
        # torch's CheckpointException is a BaseException. After any error, the unfinished folder is removed.
        except BaseException as fault:
            reason = failure_cause(fault, draft)
            _remove(draft)
            if reason is None:
                raise
            raise save_failed(self._folder(step), fault, reason, needed_bytes) from fault
        return Checkpoint(folder=self._folder(step), step=step, files=files, about=about)

    def _show(self, draft: Path, step: int) -> None:
        """Rename a complete draft of a checkpoint to its final name. An older checkpoint of that name exists
        until the rename.
        """
        final, before = self._folder(step), self._hidden_name("replaced", step)
        if os.path.lexists(final):
            # A folder cannot be renamed to the name of a non-empty folder.
            final.rename(before)
        try:
            draft.rename(final)
            # The new name must be flushed to the disk before the old checkpoint is removed.
            sync(self.root)
        except BaseException:
            with suppress(OSError):
                final.rename(draft)
            with suppress(OSError):
                before.rename(final)
            raise
        _remove(before)

    def new_draft(self, step: int) -> Path:
        """Create and return a hidden folder for files of this step that are written before the checkpoint's
        save.

        The next `sweep` removes the folder if no save used it.
        """
        draft = self._hidden_name("draft", step)
        draft.mkdir()
        return draft

    def newest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint, or None if there is none at all.

        Damaged newer checkpoints are renamed and listed in `broken`. Raises `NoIntactCheckpoint` and then
        changes nothing, so that the next start is refused as well. Raises `NewerCheckpoint`, and
        `SnugfitError` for a folder that cannot be read.
        """
        ignored: list[DamagedCheckpoint] = []
        for step, folder in self._checkpoints():
            try:
                checkpoint = verify(folder, step)
            except BrokenCheckpoint as fault:
                ignored.append(DamagedCheckpoint(step=step, folder=folder, fault=str(fault), moved_to=folder))
                continue
            self.broken += [self._set_aside(broken) for broken in ignored]
            return checkpoint
        if not ignored:
            return None
        self.broken += ignored
        raise NoIntactCheckpoint(
            f"{self.root} has checkpoints, but none of them is complete. {'; '.join(map(str, ignored))}. "
            f"Put a complete one there, or start again {self._begin_anew}, which renames these."
        )

    def _set_aside(self, broken: DamagedCheckpoint) -> DamagedCheckpoint:
        try:
            return replace(broken, moved_to=self._rename_aside(broken.step, broken.folder, "broken"))
        except OSError:  # the folder may be read-only
            return broken

    def restart(self) -> list[Path]:
        """Rename every checkpoint for a run that begins anew; return the new paths.

        The oldest is renamed first: after an interruption, the newest checkpoint of the old run is still
        there. Raises `SnugfitError` if the system refuses, because the next start would resume from one of
        them.
        """
        return self._rename_all_aside(self._checkpoints()[::-1], "before-restart")

    def set_aside_newer(self, step: int) -> list[Path]:
        """Rename the checkpoints after this step for a run that goes back to it; return the new paths.

        The newest is renamed first, so that the rest is the beginning of one run even after an interruption.
        Raises the errors of `restart`.
        """
        newer = [(later, folder) for later, folder in self._checkpoints() if later > step]
        return self._rename_all_aside(newer, "superseded")

    def _rename_all_aside(self, checkpoints: list[tuple[int, Path]], reason: str) -> list[Path]:
        try:
            return [self._rename_aside(step, folder, reason) for step, folder in checkpoints]
        except OSError as refusal:
            raise SnugfitError(
                f"{self.root}: the checkpoints there cannot be renamed ({refusal.strerror}), but a run "
                "that starts again or resumes from an earlier one must not find them. Name another folder."
            ) from None

    def retain(self, limit: int | None, keep: Set[int] = frozenset(), *, newest: bool = True) -> list[int]:
        """Remove the oldest checkpoints beyond `limit`, and return their steps.

        None, 0 or less means no limit, as in the Trainer. The newest is never removed unless `newest` is
        False, and the steps in `keep` never are. Visibly broken ones are neither counted nor removed; bytes
        are not read again for this. Raises `SnugfitError` if the system refuses.
        """
        whole = [
            (step, folder)
            for step, folder in self._checkpoints()
            if _NAME.fullmatch(folder.name) and _is_complete(folder, step)
        ]
        surplus = len(whole) - limit if limit is not None and limit > 0 else 0
        # `newest` is 1 or 0, so that `whole[1:]` excludes the newest checkpoint from removal.
        spare = [(step, folder) for step, folder in reversed(whole[newest:]) if step not in keep]
        spare = spare[: max(0, surplus)]
        gone = [self._hidden_name("gone", step) for step, _ in spare]
        try:
            # All folders are renamed before any is removed, so that an interruption leaves no partial
            # checkpoint.
            for (_, folder), hidden in zip(spare, gone):
                folder.rename(hidden)
            if gone:
                sync(self.root)
        except OSError as refusal:
            raise SnugfitError(
                f"{self.root}: old checkpoints could not be removed ({refusal.strerror}). The newer "
                "ones are complete. Remove them yourself."
            ) from None
        for hidden in gone:
            _remove(hidden)
        return [step for step, _ in spare]

    def _checkpoints(self) -> list[tuple[int, Path]]:
        """Return the steps and folders of all checkpoints, newest first.

        If a replacement was interrupted, the new checkpoint comes before the old one of the same step.
        """
        try:
            paths = list(self.root.iterdir())
        except FileNotFoundError:
            return []
        except OSError as refusal:
            raise SnugfitError(
                f"{self.root} cannot be read: {refusal.strerror}. Name another folder."
            ) from None
        # In the reverse of this order, a checkpoint comes before the one that it replaced.
        by_age = [(int(mark[1]), True, path) for path in paths if (mark := _NAME.fullmatch(path.name))]
        for path in paths:
            if (mark := _HIDDEN.fullmatch(path.name)) and mark[1] == "replaced":
                by_age.append((int(mark[2]), False, path))
        return [(step, path) for step, _, path in sorted(by_age, reverse=True)]

    def _rename_aside(self, step: int, folder: Path, reason: str) -> Path:
        """Rename a checkpoint so that searches ignore it; return its new path."""
        path = self.root / f"checkpoint-{step}.{reason}"
        for number in itertools.count(2):
            if not os.path.lexists(path):
                break
            path = self.root / f"checkpoint-{step}.{reason}-{number}"
        folder.rename(path)
        sync(self.root)
        return path

    def _folder(self, step: int) -> Path:
        return self.root / f"checkpoint-{step}"

    def _hidden_name(self, kind: str, step: int) -> Path:
        return self.root / f".{kind}-{step}-{secrets.token_hex(4)}"


def _is_complete(folder: Path, step: int) -> bool:
    try:
        return bool(check_sizes(folder, step))
    except SnugfitError:
        return False


def _remove(path: Path) -> None:
    """Remove a file or folder and ignore errors, because the next start of a run tries again."""
    with suppress(OSError):
        # A symbolic link is removed, but not the folder that it refers to.
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
