"""The manager of a run's checkpoints: it copies a state between two steps and writes it during the next ones.

Training waits for the copy to the host, and for an unfinished earlier save, but never for a disk. If a save
fails, the run continues with a warning, because the next save may work. If the last save fails, the run ends
with an error.

Every front-end has a manager. Front-ends differ in the content of a snapshot, and in the properties that
identify a run.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final, runtime_checkable

from snugfit.errors import SnugfitError, UsageError
from snugfit.training.checkpoint.lock import hold_folder
from snugfit.training.checkpoint.manifest import BrokenCheckpoint, Checkpoint, SaveStopped, verify
from snugfit.training.checkpoint.save_failed import SaveFailed
from snugfit.training.checkpoint.staging import Staging
from snugfit.training.checkpoint.state import TrainState, check_packable, tensor_bytes
from snugfit.training.checkpoint.store import Store
from snugfit.training.ranks import ALONE, Ranks, ToldElsewhere

if TYPE_CHECKING:
    import torch

    from snugfit.training.journal import Journal

LONGEST_VALUE = 60
"""Largest number of characters of a setting's value in an error about two different runs."""


class Writable(Protocol):
    """Protocol of a snapshot of a run that can be written to files."""

    @property
    def step(self) -> int:
        """The number of optimizer steps finished before the snapshot."""

    @property
    def bytes(self) -> int:
        """The size of the snapshot's files in bytes."""

    def write(self, folder: Path) -> None:
        """Write the checkpoint's files into `folder`."""


@runtime_checkable
class WrittenByAll(Writable, Protocol):
    """Protocol of a snapshot that several processes write into one checkpoint, each process its own files."""

    def write_share(self) -> None:
        """Write this process's own files of the checkpoint, while the first process runs `write`."""

    def close(self) -> None:
        """Notify the other processes that the first process has finished or abandoned its write."""


@contextmanager
def open_store(folder: Path, *, begin_anew: str) -> Iterator[Store]:
    """Context that locks a folder of checkpoints and yields its store. Incomplete checkpoints of dead
    processes are removed.

    `begin_anew` is advice for error messages: a way to start a new run. Raises `UsageError` if checkpoints
    cannot be saved there, or another trainer writes there.
    """
    store = Store(folder, begin_anew=begin_anew)
    store.prepare()
    with hold_folder(store.root):
        store.sweep()
        yield store


@contextmanager
def open_shared_store(folder: Path, ranks: Ranks, *, begin_anew: str) -> Iterator[Store]:
    """Context that yields the store of a folder in several processes; the first process locks the folder for
    all.
    """
    with ExitStack() as stack:

        def hold() -> bool:
            stack.enter_context(open_store(folder, begin_anew=begin_anew))
            return True

        ranks.first_answers(hold)
        yield Store(folder, begin_anew=begin_anew)


def named_step(folder: Path, root: Path, *, in_root: bool = True) -> int:
    """Return the step of a checkpoint folder that a user passes to resume a run in `root`.

    A checkpoint that was being replaced when its writer died is accepted. Raises `UsageError` for a folder
    that is no checkpoint, or with `in_root` for one outside of `root`.
    """
    mark = re.fullmatch(r"checkpoint-([0-9]+)", folder.name)
    if mark is None or not (folder.is_dir() or any(folder.parent.glob(f".replaced-{mark[1]}-*"))):
        names = ", ".join(sorted(path.name for path in root.glob("checkpoint-*")))
        raise UsageError(
            f"The checkpoint to resume from is {str(folder)!r}; it must be a folder checkpoint-N. "
            f"{root} has {names or 'none'}."
        )
    # Only the parent folder is resolved. A symbolic link to a checkpoint belongs to the folder that contains
    # the link.
    if in_root and folder.absolute().parent.resolve() != root.resolve():
        raise UsageError(
            f"The checkpoint to resume from is {str(folder)!r}, and the run's folder is {root}. "
            "Name one of the checkpoints in it, or use that folder as the output folder."
        )
    return int(mark[1])


@final
class CheckpointManager:
    """Saves snapshots of one run into its folder one at a time, and finds the checkpoint to resume from."""

    def __init__(
        self,
        store: Store,
        journal: Journal,
        device: torch.device,
        *,
        limit: int | None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.store, self._journal, self._limit = store, journal, limit
        self._ranks = ranks
        self._staging = Staging(device)
        self._thread: threading.Thread | None = None
        self._is_waited_for = False
        self.is_too_late: Callable[[], bool] = lambda: False
        """Function that returns True once the time limit for stopping a run is over. A save that the run
        waits for is then abandoned."""
        self.about: dict[str, Any] = {}
        """Description of the run, as JSON values, that each checkpoint stores."""
        self.saved_step: int | None = None
        """Number of the step of the newest checkpoint, or of the checkpoint from which the run was resumed.
        None without one."""
        self.is_update_checked = False
        """True once `check_first_update` has run, or if the optimizer needs no check."""
        self._failure: Exception | None = None

    def check_first_update(self, state: Callable[[], TrainState]) -> None:
        """After this process's first update, check that a checkpoint can contain the optimizer's states.

        Raises `SnugfitError` for states that a checkpoint cannot contain.
        """
        if not self.is_update_checked:
            self.is_update_checked = True
            check_packable(state())

    # ---- saving ------------------------------------------------------------------------------------------

    def prepare(self, state: TrainState) -> None:
        """Allocate the host memory for snapshots of this state, in a thread during the first steps."""
        self._staging.prepare(tensor_bytes(state))

    def save(self, step: int, take: Callable[[Staging], Writable | None], *, best: int | None = None) -> None:
        """Take a snapshot of the run's state after the previous one is written, and start to write it.

        Nothing happens if this step has a snapshot already. The checkpoint of step `best` stays. The first of
        several processes owns the store. In the other processes, `take` returns their part of the snapshot,
        or None.
        """
        if step == self.saved_step:
            return
        begun = time.perf_counter()
        # The new snapshot uses the same host memory as the previous one, which must be written first.
        self.wait()
        snapshot = take(self._staging)
        # Set before the checkpoint is written, so that no second save of this step starts.
        self.saved_step = step
        if snapshot is None:
            return
        keep = frozenset(() if best is None else (best,))
        # The thread gets a copy, because the training may change the description meanwhile.
        work = (snapshot, dict(self.about), keep, time.perf_counter() - begun)
        write = self._write if self._ranks.is_first else _write_share
        thread = threading.Thread(target=write, args=work, name="snugfit-save")
        try:
            thread.start()
        except RuntimeError:  # no thread can start: the training waits instead
            write(*work)
        else:
            self._thread = thread

    def _write(
        self, snapshot: Writable, about: Mapping[str, Any], keep: frozenset[int], blocked: float
    ) -> None:
        begun = time.perf_counter()
        self._failure = None
        try:
            checkpoint = self.store.save(
                snapshot.step,
                snapshot.write,
                about,
                stop=self._should_stop,
                needed_bytes=snapshot.bytes,
            )
            refused = self._retain(keep)
        except ToldElsewhere as ended:  # the training steps raise it as well
            self._failure = ended
        except SaveStopped as stopped:
            self._failure = stopped
            text = f"{stopped} The time allowed for stopping is over. Earlier checkpoints are unchanged."
            self._journal.tell("warning", text=text)
        except SaveFailed as failed:
            self._failure = failed
            self._journal.tell("warning", text=f"{failed} The run continues.")
        except Exception as fault:  # otherwise, the thread would lose the error
            self._failure = fault
            reason = str(fault) or type(fault).__name__
            self._journal.tell(
                "warning",
                text=(
                    f"A checkpoint was not saved: {reason}. The run continues. Remove the cause before the "
                    "next save."
                ),
            )
        else:
            self._journal.tell(
                "saved",
                step=snapshot.step,
                folder=str(checkpoint.folder),
                bytes=snapshot.bytes,
                blocked_seconds=blocked,
                seconds=time.perf_counter() - begun,
            )
            if refused:
                self._journal.tell("warning", text=f"{refused} The run continues.")
        finally:
            # The other processes wait for this call, even if saving failed.
            if isinstance(snapshot, WrittenByAll):
                snapshot.close()

    def _retain(self, keep: frozenset[int]) -> str:
        """Remove the oldest checkpoints beyond the limit. Return an error text if a removal failed, else an
        empty text. The save itself does not fail.
        """
        try:
            self.store.retain(self._limit, keep)
        except (ToldElsewhere, SaveStopped):
            raise
        except SnugfitError as refusal:
            return str(refusal)
        return ""

    def _should_stop(self) -> bool:
        return self._is_waited_for and self.is_too_late()

    def wait(self) -> None:
        """Wait until the current save is written, or until the time limit of a stop."""
        self._is_waited_for = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._is_waited_for = False

    @property
    def failure(self) -> str | None:
        """The error text if the last checkpoint could not be saved, or None."""
        return None if self._failure is None else f"The last checkpoint was not saved: {self._failure}"

    def raise_if_last_failed(self) -> None:
        """Raise `SnugfitError` if the last checkpoint could not be saved."""
        if self.failure is not None:
            raise SnugfitError(self.failure)

    # ---- resuming ----------------------------------------------------------------------------------------

    def newest(self) -> Checkpoint | None:
        """Wait for the current save and return the newest whole checkpoint, or None. Newer damaged
        checkpoints are reported.
        """
        self.wait()
        known = len(self.store.broken)
        checkpoint = self.store.newest()
        # Damaged checkpoints that were found earlier were reported already.
        for broken in self.store.broken[known:]:
            self._journal.tell("warning", text=f"ignored {broken}")
        return checkpoint

    def checkpoint_at(self, folder: Path, *, in_store: bool = False) -> Checkpoint:
        """Return the checkpoint that a user names.

        With `in_store` it must be in the run's own folder, for a run that may return to its last checkpoint.
        Raises `UsageError` for another folder, and the errors of `verify`.
        """
        step = named_step(folder, self.store.root, in_root=in_store)
        try:
            return verify(folder, step)
        except BrokenCheckpoint as fault:
            raise BrokenCheckpoint(f"{folder}: {fault}") from None

    def _is_in_store(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.folder.absolute().parent.resolve() == self.store.root.resolve()

    def discard_later(self, checkpoint: Checkpoint) -> None:
        """Rename all later checkpoints when a run resumes from this one, so that the next start ignores them.

        If the checkpoint is from another folder, all checkpoints of this folder are renamed.
        """
        if not self._is_in_store(checkpoint):
            self.set_aside_earlier()
            return
        for moved in self.store.set_aside_newer(checkpoint.step):
            text = f"The run resumes from {checkpoint.folder.name}; {moved.stem} was renamed to {moved.name}."
            self._journal.tell("warning", text=text)

    def set_aside_earlier(self) -> None:
        """Rename the old checkpoints in the folder of a new run."""
        for moved in self.store.restart():
            self._journal.tell("warning", text=f"An earlier run's checkpoint was renamed to {moved.name}.")

    def refuse_another_run(
        self,
        checkpoint: Checkpoint,
        wrong: Sequence[str],
        changed: Sequence[str],
        *,
        cure: str = "",
    ) -> None:
        """Raise `UsageError` if `wrong` names reasons against resuming from this checkpoint, such as another
        job. Each entry of `changed` becomes a warning: the run resumes, but its numbers are not identical bit
        for bit.
        """
        if wrong:
            raise UsageError(f"{checkpoint.folder} is a checkpoint of another run: {'; '.join(wrong)}.{cure}")
        for change in changed:
            text = f"{change}: the run continues correctly, but no longer bit for bit"
            self._journal.tell("warning", text=text)


def _write_share(snapshot: Writable, *_: Any) -> None:
    """Write a checkpoint's files of a process other than the first. Its errors are reported by the first
    process.
    """
    if isinstance(snapshot, WrittenByAll):
        with suppress(Exception):
            snapshot.write_share()


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str] = (), *, prefix: str = ""
) -> list[str]:
    """Return sentences on the differences between two descriptions of runs, for these names or all."""

    def short(value: Any) -> str:
        text = json.dumps(value) if not isinstance(value, str) else repr(value)
        return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."

    return [
        f"{prefix}{name} was {short(before.get(name))} and is now {short(now.get(name))}"
        for name in names or dict.fromkeys((*now, *before))
        if before.get(name) != now.get(name)
    ]
