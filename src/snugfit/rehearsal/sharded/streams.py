"""Streams of a rehearsal: which is current, and which kernels wait for which of other streams.

A stream runs its kernels one after the other. An event marks the moment up to which a stream has come; a
stream that waits for it runs nothing further before all of that is done. Only kernels of the recorded step
have numbers, so what an event of an earlier step marks is nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from snugfit.rehearsal.trace.trace import DEFAULT_STREAM

Moment = frozenset[int]
"""Numbers of the kernels that a stream has last run, or waits for before it runs the next."""


class StreamOrder:
    """The streams of one rehearsal by number; 0 is the one that computes."""

    def __init__(self, tell: Callable[[int], int]) -> None:
        self._tell = tell
        self.current = DEFAULT_STREAM
        """The stream in which work is put now."""
        self._made = DEFAULT_STREAM
        self._last: dict[int, int] = {}  # kernel that a stream has last run
        self._awaited: defaultdict[int, set[int]] = defaultdict(set)  # before the next

    def make(self) -> int:
        """The number of a new stream."""
        self._made += 1
        return self._made

    def use(self, stream: int) -> None:
        """Puts what follows into this stream, kernels and allocations alike."""
        self.current = stream
        self._tell(stream)

    def moment(self, stream: int) -> Moment:
        """The moment up to which a stream has come."""
        last = {self._last[stream]} if stream in self._last else set()
        return frozenset(last | self._awaited[stream])

    def wait(self, stream: int, moment: Moment) -> None:
        """The stream runs nothing further before this moment of another."""
        self._awaited[stream] |= moment - {self._last.get(stream, -1)}

    def place(self, number: int) -> tuple[int, tuple[int, ...]]:
        """The stream of the kernel that has this number, and which kernels it waits for."""
        awaited = tuple(sorted(self._awaited.pop(self.current, ())))
        self._last[self.current] = number
        return self.current, awaited
