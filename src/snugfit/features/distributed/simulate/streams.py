"""Streams of a simulation: the current one, and the waits between kernels of different streams.

A stream runs its kernels one after the other. An event marks the position of a stream. A stream that waits
for the event runs nothing further until all earlier work of the other stream is finished.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from snugfit.rehearsal.trace.trace import DEFAULT_STREAM

Moment = frozenset[int]
"""Position in a stream: indices of its last kernel, and of kernels of other streams for which its next one
waits.
"""


class StreamOrder:
    """The current stream of a simulation, and the waits between streams. Streams are numbers; 0 is the
    computing stream.
    """

    def __init__(self, tell: Callable[[int], int]) -> None:
        self._tell = tell
        self.current = DEFAULT_STREAM
        """Number of the current stream."""
        self._made = DEFAULT_STREAM
        self._last: dict[int, int] = {}  # index of each stream's last kernel
        self._awaited: defaultdict[int, set[int]] = defaultdict(set)  # kernels for which its next one waits

    def make(self) -> int:
        """Return the index of a newly created stream."""
        self._made += 1
        return self._made

    def use(self, stream: int) -> None:
        """Set the stream of later kernels and allocations."""
        self.current = stream
        self._tell(stream)

    def moment(self, stream: int) -> Moment:
        """Return the current position of a stream: the kernels that must end before it continues."""
        # Only kernels of the recorded step have indices, so an event of an earlier step has none.
        last = {self._last[stream]} if stream in self._last else set()
        return frozenset(last | self._awaited[stream])

    def wait(self, stream: int, moment: Moment) -> None:
        """Let a stream wait for a position of another stream."""
        # A stream runs after its own last kernel anyway.
        self._awaited[stream] |= moment - {self._last.get(stream, -1)}

    def place(self, number: int) -> tuple[int, tuple[int, ...]]:
        """Record a kernel with this index on the current stream. Return the stream, and the kernels of other
        streams for which it waits.
        """
        awaited = tuple(sorted(self._awaited.pop(self.current, ())))
        self._last[self.current] = number
        return self.current, awaited
