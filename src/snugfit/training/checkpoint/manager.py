"""One run's checkpoints: copied between two steps, written while the next ones run, and found again.

Training waits for the copy to the host, and for the save before this one when that is not done yet; never for
a disk. A save that fails is a warning and the run goes on, for the next one may work; whether the last one
failed counts when the run ends.

Every front-end has one of these. What differs is what a snapshot holds, and what makes a checkpoint another
run's.
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
from snugfit.training.checkpoint.state import TrainState, tensor_bytes
from snugfit.training.checkpoint.store import Store
from snugfit.training.ranks import ALONE, Ranks, ToldElsewhere

if TYPE_CHECKING:
    import torch

    from snugfit.training.journal import Journal

LONGEST_VALUE = 60
"""Characters of a value in an error that lays two runs beside each other."""


class Writable(Protocol):
    """A checkpoint that can be written."""

    @property
    def step(self) -> int:
        """The optimizer steps that are done."""

    @property
    def bytes(self) -> int:
        """How much room it takes."""

    def write(self, folder: Path) -> None:
        """Writes the checkpoint's files into `folder`."""


@runtime_checkable
class WrittenByAll(Writable, Protocol):
    """A checkpoint that several processes write, each its part."""

    def write_share(self) -> None:
        """What another process than the first does while the first does `write`."""

    def close(self) -> None:
        """In the first: it is written, or will not be. The others wait for that."""


@contextmanager
def open_store(folder: Path, *, begin_anew: str) -> Iterator[Store]:
    """The store in this folder, for this process alone, cleared of what writers that died have left;
    `begin_anew` says in an error how a user does so.

    Raises `UsageError` where checkpoints cannot be kept, or another trainer writes.
    """
    store = Store(folder, begin_anew=begin_anew)
    store.prepare()
    with hold_folder(store.root):
        store.sweep()
        yield store


@contextmanager
def open_shared_store(folder: Path, ranks: Ranks, *, begin_anew: str) -> Iterator[Store]:
    """The store in this folder, which the first process holds for all."""
    with ExitStack() as held:

        def hold() -> bool:
            held.enter_context(open_store(folder, begin_anew=begin_anew))
            return True

        ranks.first_answers(hold)
        yield Store(folder, begin_anew=begin_anew)


def named_step(folder: Path, root: Path, *, in_root: bool = True) -> int:
    """The step of the checkpoint that a user names for a run in `root`; one that was being replaced when its
    writer died counts. Raises `UsageError` where the folder is none, or with `in_root` stands elsewhere."""
    mark = re.fullmatch(r"checkpoint-([0-9]+)", folder.name)
    if mark is None or not (folder.is_dir() or any(folder.parent.glob(f".replaced-{mark[1]}-*"))):
        names = ", ".join(sorted(path.name for path in root.glob("checkpoint-*")))
        raise UsageError(
            f"The checkpoint to resume from is {str(folder)!r}; it must be a folder checkpoint-N. "
            f"{root} has {names or 'none'}."
        )
    if in_root and folder.absolute().parent.resolve() != root.resolve():
        raise UsageError(
            f"The checkpoint to resume from is {str(folder)!r}, and the run's folder is {root}. "
            "Name one of the checkpoints in it, or use that folder as the output folder."
        )
    return int(mark[1])


@final
class CheckpointManager:
    """Saves snapshots into a store, one after the other, and finds what a run is resumed from."""

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
        """Whether the time that a stop may take is over: then what is being written is given up while it is
        waited for."""
        self.about: dict[str, Any] = {}
        """What every checkpoint says of its run; JSON can hold it."""
        self.saved_step: int | None = None
        """The step of the newest checkpoint, or of the one that the run was resumed from."""
        self._failure: Exception | None = None

    # ---- saving ------------------------------------------------------------------------------------------

    def prepare(self, state: TrainState) -> None:
        """Takes the memory that snapshots of this state are copied to, while the first steps run."""
        self._staging.prepare(tensor_bytes(state))

    def save(self, step: int, take: Callable[[Staging], Writable | None], *, best: int | None = None) -> None:
        """Takes a snapshot of this boundary when the one before is written, and begins to write it; nothing
        where there is one of this step. The checkpoint of step `best` stays. Of several processes the first
        keeps the store; of another `take` gives what it writes beside that, or None."""
        if step == self.saved_step:
            return
        begun = time.perf_counter()
        self.wait()
        snapshot = take(self._staging)
        self.saved_step = step
        if snapshot is None:
            return
        keep = frozenset(() if best is None else (best,))
        work = (snapshot, dict(self.about), keep, time.perf_counter() - begun)
        write = self._write if self._ranks.is_first else _write_share
        thread = threading.Thread(target=write, args=work, name="snugfit-save")
        try:
            thread.start()
        except RuntimeError:  # a limit on memory or processes leaves none: then training waits
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
                stop=self._is_told_to_stop,
                needed_bytes=snapshot.bytes,
            )
            refused = self._retain(keep)
        except ToldElsewhere as ended:  # the steps end by it too
            self._failure = ended
        except SaveStopped as stopped:
            self._failure = stopped
            text = f"{stopped} The time allowed for stopping is over. Earlier checkpoints are unchanged."
            self._journal.tell("warning", text=text)
        except SaveFailed as failed:
            self._failure = failed
            self._journal.tell("warning", text=f"{failed} The run continues.")
        except Exception as fault:  # in a thread nobody else would hear of it
            self._failure = fault
            reason = str(fault) or type(fault).__name__
            self._journal.tell("warning", text=f"A checkpoint was not saved: {reason}. The run continues.")
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
            if isinstance(snapshot, WrittenByAll):
                snapshot.close()

    def _retain(self, keep: frozenset[int]) -> str:
        """Remove the checkpoints beyond the limit, and return why that was refused. What was saved is no
        less saved."""
        try:
            self.store.retain(self._limit, keep)
        except (ToldElsewhere, SaveStopped):
            raise
        except SnugfitError as refusal:
            return str(refusal)
        return ""

    def _is_told_to_stop(self) -> bool:
        return self._is_waited_for and self.is_too_late()

    def wait(self) -> None:
        """Until nothing is being written; not longer than a stop may take."""
        self._is_waited_for = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._is_waited_for = False

    @property
    def failure(self) -> str | None:
        """Why the checkpoint that was saved last could not be kept; None where it was."""
        return None if self._failure is None else f"The last checkpoint was not saved: {self._failure}"

    def raise_if_last_failed(self) -> None:
        """Raises `SnugfitError` when the checkpoint that was saved last could not be kept."""
        if self.failure is not None:
            raise SnugfitError(self.failure)

    # ---- resuming ----------------------------------------------------------------------------------------

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, when none is being written; None where there is none. Broken
        ones that are newer are reported."""
        self.wait()
        known = len(self.store.broken)
        checkpoint = self.store.newest()
        for broken in self.store.broken[known:]:
            self._journal.tell("warning", text=f"ignored {broken}")
        return checkpoint

    def checkpoint_at(self, folder: Path, *, in_store: bool = False) -> Checkpoint:
        """The checkpoint that a user names; with `in_store` of a run that may have to go back to its last
        one, which stands in its folder. Raises `UsageError` for what is none, and as `verify` does."""
        step = named_step(folder, self.store.root, in_root=in_store)
        try:
            return verify(folder, step)
        except BrokenCheckpoint as fault:
            raise BrokenCheckpoint(f"{folder}: {fault}") from None

    def _is_in_store(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.folder.absolute().parent.resolve() == self.store.root.resolve()

    def go_back_to(self, checkpoint: Checkpoint) -> None:
        """For a run that goes on from this one, whatever stands after it: that gets other names, for the next
        start must not meet it. Of a checkpoint from elsewhere that is everything here."""
        if not self._is_in_store(checkpoint):
            self.set_aside_earlier()
            return
        for moved in self.store.set_aside_newer(checkpoint.step):
            text = f"The run resumes from {checkpoint.folder.name}; {moved.stem} was renamed to {moved.name}."
            self._journal.tell("warning", text=text)

    def set_aside_earlier(self) -> None:
        """For a run that begins anew: what stands in its folder gets other names."""
        for moved in self.store.restart():
            self._journal.tell("warning", text=f"An earlier run's checkpoint was renamed to {moved.name}.")

    def refuse_another_run(
        self,
        checkpoint: Checkpoint,
        wrong: Sequence[str],
        changed: Sequence[str],
        *,
        cure: str = "",
        note: str = "",
    ) -> None:
        """Raises `UsageError` for what is `wrong` about resuming from this checkpoint; warns of what has
        `changed` and only keeps the numbers from being the same bit for bit, and passes on what is to be
        noted."""
        if wrong:
            raise UsageError(f"{checkpoint.folder} is a checkpoint of another run: {'; '.join(wrong)}.{cure}")
        for change in changed:
            text = f"{change}: the run continues correctly, but no longer bit for bit"
            self._journal.tell("warning", text=text)
        if note:
            self._journal.tell("note", text=note)


def _write_share(snapshot: Writable, *_: Any) -> None:
    """What another process than the first writes. Whether the checkpoint is whole is the first's to say."""
    if isinstance(snapshot, WrittenByAll):
        with suppress(Exception):
            snapshot.write_share()


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str] = (), *, prefix: str = ""
) -> list[str]:
    """What is not the same in two descriptions, by its name; of all there is, or of these names."""

    def short(value: Any) -> str:
        text = json.dumps(value) if not isinstance(value, str) else repr(value)
        return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."

    return [
        f"{prefix}{name} was {short(before.get(name))} and is {short(now.get(name))}"
        for name in names or dict.fromkeys((*now, *before))
        if before.get(name) != now.get(name)
    ]
