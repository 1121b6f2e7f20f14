"""Signals during a run: it ends between two steps with a checkpoint, and can be resumed.

| signal         | effect                                                                                    |
|----------------|-------------------------------------------------------------------------------------------|
| SIGTERM once   | checkpoint at the next boundary, exit 75 (a scheduler reclaims its machine)               |
| SIGHUP once    | the same (the terminal was closed), unless the process ignores it, as under `nohup`       |
| SIGINT once    | the same, exit 130 (Ctrl-C)                                                               |
| any of them    | immediate exit 143, 129 or 130; the last whole checkpoint is unchanged                    |
|   again        |                                                                                           |
| SIGUSR1        | a checkpoint at the next boundary, and training continues                                 |
| a trigger file | the same, for users who cannot send signals: `touch FOLDER/checkpoint-now`                |

A signal handler only records the signal. The training loop saves a checkpoint between two steps. Handlers are
installed in the main thread only (Python allows no other) and are restored afterwards.

An evaluation may take longer than the allowed time after a signal. It changes no weight, so it is abandoned.
snugfit's own evaluation stops between two batches. An evaluation of the Trainer or of a user stops before the
forward pass of the next module.

A signal may reach the processes of a run at different times. If one process stopped earlier, the others would
wait for it. The processes therefore exchange their signals in each step (`run/exchange.py`), and all react in
the same step. A run of one process reads its own `Interrupts` without this delay.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, final

from snugfit.training.ranks import Ranks

TRIGGER = "checkpoint-now"
EXIT_CODES = {signal.SIGTERM: 75, signal.SIGHUP: 75, signal.SIGINT: 130}
"""Exit codes of a run that stopped after one signal and can be resumed, by signal."""
AT_ONCE = {signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGINT: 130}
"""Exit codes of a run that ended immediately at a second signal, by signal."""


class EvaluationStopped(BaseException):
    """Raised when a signal stops an evaluation. Not an `Exception`, since it passes through the user's
    code."""


class Interrupts:
    """Records signals and checkpoint requests (trigger files) within a context; without a folder, signals
    alone.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        stop_seconds: float | None = None,
    ) -> None:
        self._trigger = None if folder is None else folder / TRIGGER
        self._stop_seconds = stop_seconds
        self._stopping: signal.Signals | None = None
        self._deadline = float("inf")
        self._wants_checkpoint = False
        self._before: dict[signal.Signals, Any] = {}
        self._look: Callable[[Any], None] | None = None
        self._hook: Any = None

    def __enter__(self) -> Self:
        # Python allows only the main thread to set signal handlers.
        if threading.current_thread() is threading.main_thread():
            for number in EXIT_CODES:
                # nohup ignores SIGHUP, so that a run continues after its terminal is closed.
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
            # The second signal ends the process at once, without any thread or handler that could delay it.
            os._exit(AT_ONCE[signal.Signals(number)])
        self._stopping = signal.Signals(number)
        self._begin_deadline()
        # If an evaluation is running, hooks on modules detect the signal from here on.
        self.watch_modules(self._look)

    def _begin_deadline(self) -> None:
        if self._stop_seconds is not None:
            self._deadline = time.monotonic() + self._stop_seconds

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._wants_checkpoint = True

    @property
    def stopping(self) -> signal.Signals | None:
        """The signal that ends the run at the end of the current step, or None."""
        return self._stopping

    @property
    def too_late(self) -> bool:
        """True if the time limit for a checkpoint after a signal is over."""
        return time.monotonic() > self._deadline

    def begin_last_save(self) -> None:
        """Prepare the last checkpoint: restart its time limit if a single step or batch has used it up.

        Without this the steps since the last checkpoint would be lost.
        """
        if self.too_late:
            self._begin_deadline()

    def watch_modules(self, callback: Callable[[Any], None] | None) -> None:
        """Call `callback` with every module before its forward pass, once a signal to stop has come; None
        turns this off.

        Before the signal this costs nothing.
        """
        self._look = callback
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if callback is not None and self._stopping is not None:
            self._hook = _before_each_module(callback)

    def raise_if_stopping(self) -> None:
        """Raise `EvaluationStopped` after a signal, between two batches of an evaluation."""
        if self._stopping is not None:
            raise EvaluationStopped

    def wants_checkpoint(self) -> bool:
        """Return True if the user has requested a checkpoint since the last call."""
        was_requested, self._wants_checkpoint = self._wants_checkpoint, False
        if self._trigger is None:
            return was_requested
        try:
            # If the removal succeeds, the file existed. Both are one atomic operation.
            self._trigger.unlink()
        except OSError:  # usually, there is no such file
            return was_requested
        return True


def _before_each_module(callback: Callable[[Any], None]) -> Any:
    """Call `callback` before each module's forward in the main thread; return the handle that removes
    the hook.
    """
    from torch.nn.modules.module import register_module_forward_pre_hook

    def hook(module: Any, arguments: Any) -> None:
        # The user may run a module in another thread, which must not be stopped.
        if threading.current_thread() is threading.main_thread():
            callback(module)

    return register_module_forward_pre_hook(hook)


# ---- the same signals in all processes --------------------------------------------------------------------


_SIGNALS = tuple(EXIT_CODES)
"""Signals that stop a run, in the order of the flags that processes exchange (`Stops.flags`)."""


@final
class StopSignals:
    """The signals and checkpoint requests on which all processes of a training run act together."""

    def __init__(self, interrupts: Interrupts, ranks: Ranks) -> None:
        self._own, self._ranks = interrupts, ranks
        self._stopping: signal.Signals | None = None
        self._wants_checkpoint = False

    @property
    def flags(self) -> list[float]:
        """The signals and requests that this process has received, as numbers to be summed over processes.
        Reading the property clears a checkpoint request.
        """
        own = self._own.stopping
        return [float(number == own) for number in _SIGNALS] + [float(self._own.wants_checkpoint())]

    def set_signals(self, summed: Sequence[float]) -> None:
        """Set the signals to which all processes react, from the sums of the processes' flags."""
        *signals, checkpoint_wanted = summed
        # If processes received different signals, all react to the first in this order.
        first = next((number for number, count in zip(_SIGNALS, signals) if count), None)
        if self._stopping is None and first is not None:
            self._stopping = first
        self._wants_checkpoint |= bool(checkpoint_wanted)

    @property
    def stopping(self) -> signal.Signals | None:
        """The signal that ends the run at the end of this step in all processes, or None."""
        return self._stopping if self._ranks.are_many else self._own.stopping

    @property
    def too_late(self) -> bool:
        """True if the time to write a checkpoint is over, by this process's own clock."""
        return self._own.too_late

    def begin_last_save(self) -> None:
        """Start the time limit for the last checkpoint, as `Interrupts.begin_last_save` does."""
        self._own.begin_last_save()

    def raise_if_stopping(self) -> None:
        """Raise `EvaluationStopped` after a signal, between two batches of an evaluation, in all processes
        alike."""
        self.agree()
        if self.stopping is not None:
            raise EvaluationStopped

    def agree(self) -> None:
        """Exchange the received signals between all processes at the end of a step, if no other exchange has
        done so.
        """
        if self._ranks.are_many:
            self.set_signals(self._ranks.sum(self.flags))

    def watch_modules(self, callback: Callable[[Any], None] | None) -> None:
        """Call `Interrupts.watch_modules`, but only in a run of one process."""
        if not self._ranks.are_many:
            self._own.watch_modules(callback)

    def wants_checkpoint(self) -> bool:
        """Return True if the user has requested a checkpoint since the last call."""
        if not self._ranks.are_many:
            return self._own.wants_checkpoint()
        was_requested, self._wants_checkpoint = self._wants_checkpoint, False
        return was_requested
