"""Signals while a run goes on: it ends on a step's boundary, with a checkpoint, and can be resumed.

    SIGTERM once     checkpoint at the next boundary, exit 75 (a scheduler that takes its machine back)
    SIGINT once      the same, exit 130 (Ctrl-C)
    either again     at once, exit 143 or 130; the last whole checkpoint stays what it is
    SIGUSR1          a checkpoint at the next boundary, and training goes on
    a trigger file   the same, for who cannot send signals: `touch FOLDER/checkpoint-now`

A signal handler only notes what came: saving happens in the loop, where nothing is half done. Handlers are
installed in the main thread only (Python allows no other) and are put back afterwards.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

TRIGGER = "checkpoint-now"
EXIT_CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}
"""Exit codes of a run that was stopped once and can be resumed."""
AT_ONCE = {signal.SIGTERM: 143, signal.SIGINT: 130}
"""Exit codes of a run that was stopped twice."""


class Interrupts:
    """What was asked of the run while the context is entered."""

    def __init__(
        self, folder: Path, *, stop_seconds: float | None = None, at_once: Callable[[int], Any] = os._exit
    ) -> None:
        self._trigger, self._stop_seconds, self._at_once = folder / TRIGGER, stop_seconds, at_once
        self._stopping: signal.Signals | None = None
        self._deadline = float("inf")
        self._wants_checkpoint = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._stop)
            self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._stopping is not None:
            self._at_once(AT_ONCE[signal.Signals(number)])
        self._stopping = signal.Signals(number)
        if self._stop_seconds is not None:
            self._deadline = time.monotonic() + self._stop_seconds

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._wants_checkpoint = True

    @property
    def stopping(self) -> signal.Signals | None:
        """The signal that ends the run at the next boundary, or None."""
        return self._stopping

    @property
    def too_late(self) -> bool:
        """Whether the time to keep a checkpoint is over."""
        return time.monotonic() > self._deadline

    def wants_checkpoint(self) -> bool:
        """Whether a checkpoint was asked for since the last time this was asked."""
        asked, self._wants_checkpoint = self._wants_checkpoint, False
        try:
            self._trigger.unlink()
        except OSError:  # most often: there is none
            return asked
        return True
