"""Keeping checkpoints while the next steps run.

Training waits for the copy to the host, and for the save before this one when that is not done yet; never
for a disk. A save that fails is told and the run goes on, for the next one may work; what the last one said
counts when the run ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from snugfit.training.checkpoint.manifest import SaveStopped
from snugfit.training.checkpoint.save_failed import SaveFailed
from snugfit.training.checkpoint.store import Store

if TYPE_CHECKING:
    from snugfit.training.journal import Journal


class Content(Protocol):
    """What a checkpoint will hold: a run between two steps, which does not change any more."""

    @property
    def step(self) -> int:
        """The steps that are done."""

    @property
    def bytes(self) -> int:
        """How much it is."""

    def write(self, folder: Path) -> None:
        """Puts the files into this folder."""


class Saver:
    """Writes snapshots into a store, one after the other, in a thread."""

    def __init__(
        self, store: Store, about: Mapping[str, Any], journal: Journal, *, limit: int | None
    ) -> None:
        self._store, self._about, self._journal, self._limit = store, about, journal, limit
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], bool] = lambda: False
        self.failure: Exception | None = None
        """What the last save said, when it failed."""

    def keep(self, snapshot: Callable[[], Content], *, best: int | None) -> None:
        """Takes a snapshot when the one before is written, and begins to write it. The checkpoint of step
        `best` stays."""
        begun = time.perf_counter()
        self.wait()
        taken = snapshot()
        keep = frozenset(() if best is None else (best,))
        blocked = time.perf_counter() - begun
        thread = threading.Thread(target=self._save, args=(taken, keep, blocked), name="snugfit-save")
        try:
            thread.start()
        except RuntimeError:  # a limit on memory or processes leaves none: then training waits
            self._save(taken, keep, blocked)
        else:
            self._thread = thread

    def _save(self, snapshot: Content, keep: frozenset[int], blocked: float) -> None:
        begun = time.perf_counter()
        self.failure = None
        try:
            kept = self._store.save(
                snapshot.step,
                snapshot.write,
                self._about,
                stop=self._told_to_stop,
                needed_bytes=snapshot.bytes,
            )
            self._store.retain(self._limit, keep)
        except SaveStopped as stopped:
            self.failure = stopped
        except SaveFailed as failed:
            self.failure = failed
            self._journal.tell("warning", text=f"{failed} The run goes on.")
        except Exception as fault:  # in a thread nobody else would hear of it
            self.failure = fault
            told = str(fault) or type(fault).__name__
            self._journal.tell("warning", text=f"A checkpoint was not kept: {told}. The run goes on.")
        else:
            self._journal.tell(
                "saved",
                step=snapshot.step,
                folder=str(kept.folder),
                bytes=snapshot.bytes,
                blocked_seconds=blocked,
                seconds=time.perf_counter() - begun,
            )

    def _told_to_stop(self) -> bool:
        return self._stop()

    def wait(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Until nothing is being written; gives up what is being written when `stop` says so."""
        self._stop = stop
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._stop = lambda: False
