"""What is told of a step: noted when it has been taken, told when it is known to be sound.

A step's norm comes to the host one step later where nobody waits for it (`finite_check.py`), so its event may
have to wait; a step that has turned out to be wrong is not told at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from snugfit.job.batch import tokens_of
from snugfit.training.journal import Journal
from snugfit.training.run.order import Order
from snugfit.training.throughput import Pace

if TYPE_CHECKING:
    from snugfit.training.run.loop import Taken


class StepEvents:
    """The event of one step after the other."""

    def __init__(self, journal: Journal, pace: Pace) -> None:
        self._journal, self._pace = journal, pace
        self._untold: dict[str, Any] = {}

    def note(
        self,
        step: int,
        taken: Taken,
        pieces: Sequence[dict[str, Any]],
        order: Order,
        learning_rate: float,
        seconds: float,
        stall_seconds: float,
    ) -> None:
        """Step `step` (the first is 1) was taken, over these host micro-batches (B, S)."""
        samples = sum(len(piece) for piece in order.step(step - 1))
        tokens = sum(tokens_of(piece) for piece in pieces)
        self._untold = {
            "step": step,
            "epoch": step / order.steps_per_epoch,
            "loss": taken.loss,
            "learning_rate": learning_rate,
            "updated": taken.updated,
            "seconds": seconds,
            "stall_seconds": stall_seconds,
            "samples": samples,
            "tokens": tokens,
            **self._pace.told(step, seconds, samples, tokens),
        }

    def tell(self, norm: float | None) -> None:
        """The step that was noted last had this norm; nothing where it was told already."""
        if self._untold:
            self._journal.tell("step", **self._untold, norm=norm)
            self._untold = {}
