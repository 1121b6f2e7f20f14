"""Signals while a run goes on: it ends on a step's boundary, with a checkpoint, and can be resumed.

    SIGTERM once     checkpoint at the next boundary, exit 75 (a scheduler that takes its machine back)
    SIGHUP once      the same (the terminal was closed), unless the process ignores it, as under `nohup`
    SIGINT once      the same, exit 130 (Ctrl-C)
    any of them      at once, exit 143, 129 or 130; the last whole checkpoint stays what it is
      again
    SIGUSR1          a checkpoint at the next boundary, and training goes on
    a trigger file   the same, for who cannot send signals: `touch FOLDER/checkpoint-now`

A signal handler only notes what came: saving happens in the loop, where nothing is half done. Handlers are
installed in the main thread only (Python allows no other) and are put back afterwards.

An evaluation may take longer than anybody waits after a signal. It changes no weight, so it is abandoned: our
own between two batches, that of other code (a Trainer's, a user's) where the next module begins to compute.
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
EXIT_CODES = {signal.SIGTERM: 75, signal.SIGHUP: 75, signal.SIGINT: 130}
"""Exit codes of a run that was stopped once and can be resumed."""
AT_ONCE = {signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGINT: 130}
"""Exit codes of a run that was stopped twice."""


class EvaluationStopped(BaseException):
    """A signal has come, and the evaluation that is going on is abandoned. No `Exception`, for it passes
    through code of the user's."""


class Interrupts:
    """What was asked of the run while the context is entered; without a folder by signals alone."""

    def __init__(
        self,
        folder: Path | None,
        *,
        stop_seconds: float | None = None,
        at_once: Callable[[int], Any] = os._exit,
    ) -> None:
        self._trigger = None if folder is None else folder / TRIGGER
        self._stop_seconds, self._at_once = stop_seconds, at_once
        self._stopping: signal.Signals | None = None
        self._deadline = float("inf")
        self._wants_checkpoint = False
        self._before: dict[signal.Signals, Any] = {}
        self._look: Callable[[Any], None] | None = None
        self._hook: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in EXIT_CODES:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._stop)
            self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        self.watch_modules(None)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._stopping is not None:
            self._at_once(AT_ONCE[signal.Signals(number)])
        self._stopping = signal.Signals(number)
        self._begin_deadline()
        self.watch_modules(self._look)

    def _begin_deadline(self) -> None:
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

    def begin_last_save(self) -> None:
        """The checkpoint that a stop asks for is begun. Where a single step or batch has taken all the time
        that there was for it, there is as much again: without it the steps would be lost."""
        if self.too_late:
            self._begin_deadline()

    def watch_modules(self, look: Callable[[Any], None] | None) -> None:
        """From here on, once a signal stops the run, `look` is called with every module of the process that
        begins to compute; None ends that. Before the signal it costs nothing."""
        self._look = look
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if look is not None and self._stopping is not None:
            self._hook = _before_each_module(look)

    def raise_if_stopping(self) -> None:
        """For an evaluation, between two batches. Raises `EvaluationStopped` after a signal."""
        if self._stopping is not None:
            raise EvaluationStopped

    def wants_checkpoint(self) -> bool:
        """Whether a checkpoint was asked for since the last time this was asked."""
        asked, self._wants_checkpoint = self._wants_checkpoint, False
        if self._trigger is None:
            return asked
        try:
            self._trigger.unlink()
        except OSError:  # most often: there is none
            return asked
        return True


def _before_each_module(look: Callable[[Any], None]) -> Any:
    """Has `look` called with every module that begins to compute in the main thread; gives what ends that."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    def hook(module: Any, arguments: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            look(module)

    return register_module_forward_pre_hook(hook)
