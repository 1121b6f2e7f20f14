"""A fitted trainer's next micro-batches, made while the device is still at the backward pass of this step.

A fitted trainer waits for the gradients before each update, and the GPU then waits until it has been asked
for the update, and for the next forward pass. The Trainer makes the next batch in between, where an update is
over before it: with BERT-large at 4 x 512 in fp32, a step so took 6.1 % longer than in the bare loop
(results/h200-2026-11-22/train-overhead-doors-waiting.json). With the batch made before, it takes 2.8 %
(train-overhead-doors.json).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

Fetched = tuple[list[Any], Any]
"""Micro-batches, and what the Trainer counted in them."""


@final
class Ahead:
    """What was fetched before it was asked for."""

    def __init__(self) -> None:
        self._iterator: Any = None
        self._more: Callable[[], Fetched] | None = None
        self._waiting: Fetched | Exception | None = None

    def take(self, iterator: Any, more: Callable[[], Fetched]) -> Fetched:
        """The next of this epoch's iterator: what waits, or `more()`, which is also how the ones after it are
        made. What went wrong when they were made is raised here."""
        waiting = self._waiting if iterator is self._iterator else None
        self._iterator, self._more, self._waiting = iterator, more, None
        if isinstance(waiting, Exception):
            raise waiting
        return more() if waiting is None else waiting

    def fetch(self) -> None:
        """Has the next ones made."""
        if self._more is None or self._waiting is not None:
            return
        try:
            self._waiting = self._more()
        except Exception as fault:
            self._waiting = fault
