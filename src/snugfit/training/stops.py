"""What was asked of a run from outside, the same in all of its processes.

A signal reaches one process sooner than another, and a loop that ends in one of them leaves the others
waiting. So each tells the others once a step what it has heard (`run/exchange.py`), and all do what is known
by then. A run of one process asks its own `Interrupts`, and hears at once.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any, final

from snugfit.training.interrupt import EXIT_CODES, EvaluationStopped, Interrupts
from snugfit.training.ranks import Ranks

_SIGNALS = tuple(EXIT_CODES)
"""In the order of the flags."""


@final
class Stops:
    """The signals and wishes that all processes of a run have agreed on."""

    def __init__(self, interrupts: Interrupts, ranks: Ranks) -> None:
        self._own, self._ranks = interrupts, ranks
        self._stopping: signal.Signals | None = None
        self._wants_checkpoint = False

    @property
    def flags(self) -> list[float]:
        """What this process has heard, as numbers that can be summed. A wish for a checkpoint is taken."""
        own = self._own.stopping
        return [float(number == own) for number in _SIGNALS] + [float(self._own.wants_checkpoint())]

    def hear(self, summed: Sequence[float]) -> None:
        """Takes in the sums of all processes' flags."""
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
        """Whether the time to keep a checkpoint is over, by this process's own clock."""
        return self._own.too_late

    def begin_last_save(self) -> None:
        """The checkpoint that a stop asks for is begun."""
        self._own.begin_last_save()

    def raise_if_stopping(self) -> None:
        """For an evaluation, between two batches, in all processes alike. Raises `EvaluationStopped` after a
        signal."""
        self.agree()
        if self.stopping is not None:
            raise EvaluationStopped

    def agree(self) -> None:
        """All processes take in what each has heard. For a boundary where nothing else is exchanged."""
        if self._ranks.are_many:
            self.hear(self._ranks.sum(self.flags))

    def watch_modules(self, look: Callable[[Any], None] | None) -> None:
        """As `Interrupts.watch_modules`, in the only process of a run."""
        if not self._ranks.are_many:
            self._own.watch_modules(look)

    def wants_checkpoint(self) -> bool:
        """Whether a checkpoint was asked for since the last time this was asked."""
        if not self._ranks.are_many:
            return self._own.wants_checkpoint()
        asked, self._wants_checkpoint = self._wants_checkpoint, False
        return asked
