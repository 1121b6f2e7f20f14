"""The requests to stop a run or to keep a checkpoint, the same in all of its processes.

A signal reaches one process sooner than another, and a loop that ends in one of them leaves the others
waiting. The processes therefore exchange their signals once a step (`run/exchange.py`), and all act on the
sum. A run of one process reads its own `Interrupts` without this delay.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any, final

from snugfit.training.interrupt import EXIT_CODES, EvaluationStopped, Interrupts
from snugfit.training.ranks import Ranks

_SIGNALS = tuple(EXIT_CODES)
"""The signals in the order of the flags."""


@final
class Stops:
    """The signals and requests that all processes of a run have agreed on."""

    def __init__(self, interrupts: Interrupts, ranks: Ranks) -> None:
        self._own, self._ranks = interrupts, ranks
        self._stopping: signal.Signals | None = None
        self._wants_checkpoint = False

    @property
    def flags(self) -> list[float]:
        """The signals of this process, as numbers to be summed. Reading it consumes a checkpoint request."""
        own = self._own.stopping
        return [float(number == own) for number in _SIGNALS] + [float(self._own.wants_checkpoint())]

    def hear(self, summed: Sequence[float]) -> None:
        """Store the signals in the sums of all processes' flags."""
        *signals, wants = summed
        first = next((number for number, count in zip(_SIGNALS, signals) if count), None)
        if self._stopping is None and first is not None:
            self._stopping = first
        self._wants_checkpoint |= bool(wants)

    @property
    def stopping(self) -> signal.Signals | None:
        """The signal that ends the run at this boundary, or None."""
        return self._stopping if self._ranks.are_many else self._own.stopping

    @property
    def too_late(self) -> bool:
        """True if the time to write a checkpoint is over, by this process's own clock."""
        return self._own.too_late

    def begin_last_save(self) -> None:
        """Start the time limit of the checkpoint at a stop."""
        self._own.begin_last_save()

    def raise_if_stopping(self) -> None:
        """Raise `EvaluationStopped` after a signal, between two batches of an evaluation, in all processes
        alike."""
        self.agree()
        if self.stopping is not None:
            raise EvaluationStopped

    def agree(self) -> None:
        """Exchange the signals of all processes, at a boundary without another exchange."""
        if self._ranks.are_many:
            self.hear(self._ranks.sum(self.flags))

    def watch_modules(self, look: Callable[[Any], None] | None) -> None:
        """Call `Interrupts.watch_modules` if this is the only process of the run."""
        if not self._ranks.are_many:
            self._own.watch_modules(look)

    def wants_checkpoint(self) -> bool:
        """Return True if a checkpoint was requested since the last call."""
        if not self._ranks.are_many:
            return self._own.wants_checkpoint()
        asked, self._wants_checkpoint = self._wants_checkpoint, False
        return asked
