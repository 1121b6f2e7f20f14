"""The time at which the allocator reuses a block that is freed while another stream still uses it.

Code that uses a tensor of one stream in another marks it (`record_stream`). DeepSpeed does so for weights
that one stream gathers and another computes with. It also does so for gradients that it averages during the
backward pass. When such a tensor is dropped, the allocator records an event in those streams. The block is
free at the first allocation that finds these events completed (`insert_events`, `process_events` of
`CUDACachingAllocator.cpp`).

So the host's lead over the device decides which further bytes are reserved, and the times are those of the
simulated queue. From the drop on, torch no longer counts the block as allocated. It counts as requested until
it is free.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from snugfit.prediction.timeline import time_kernels

if TYPE_CHECKING:
    from snugfit.prediction.rates import Rates
    from snugfit.prediction.several_gpus.communication import Interconnect
    from snugfit.prediction.timeline import TimedKernel
    from snugfit.rehearsal.trace.trace import Trace

NONE_LATE: Mapping[int, int] = {}


class TakesBack(Protocol):
    """The part of an allocator that frees blocks."""

    def release(self, block: Any) -> None:
        """Free an allocated block."""

    def drop(self, block: Any) -> None:
        """Count a block as no longer allocated. It stays in place."""

    def take_back(self, block: Any) -> None:
        """Free a dropped block."""


class Frees:
    """The frees of one allocator, some of which are `late`.

    `late` maps the event that frees to the event before which the block is free again.
    """

    def __init__(self, allocator: TakesBack, late: Mapping[int, int]) -> None:
        self._allocator, self._late = allocator, late
        self._dropped: list[tuple[int, int, Any]] = []  # when it is back, a number of its own, the block

    def free(self, event: int, block: Any) -> None:
        """Free a block at this event, or drop it if its free is late."""
        if event not in self._late:
            self._allocator.release(block)
            return
        self._allocator.drop(block)
        heapq.heappush(self._dropped, (self._late[event], event, block))

    def pass_by(self, event: int) -> None:
        """Free all blocks that are due before this event, which is about to happen."""
        while self._dropped and self._dropped[0][0] <= event:
            self._allocator.take_back(heapq.heappop(self._dropped)[2])

    def finish(self) -> None:
        """Free all dropped blocks at the end of a step, when all streams have ended."""
        while self._dropped:
            self._allocator.take_back(heapq.heappop(self._dropped)[2])


def late_frees(
    trace: Trace, rates: Rates | None, connected: Interconnect, *, workers: int = 0
) -> Mapping[int, int]:
    """Return the late frees of the trace's last step, in the form of `Frees`.

    The result is empty if the trace has none, or if no rates are known.
    """
    if not trace.awaited or rates is None:
        return NONE_LATE
    return _by_moments(trace, time_kernels(trace, rates, connected, workers=workers))


def _by_moments(trace: Trace, timed: Sequence[TimedKernel]) -> Mapping[int, int]:
    ends = [kernel.start + kernel.device_seconds for kernel in timed]
    launches = [kernel.launch for kernel in timed]
    late = {}
    for event, number in enumerate(trace.events):
        awaited = trace.awaited.get(-number - 1) if number < 0 else None
        if not awaited:
            continue
        done = max(ends[kernel] for kernel in awaited)
        first = bisect.bisect_left(launches, done)  # of the kernels that are launched after that
        back = trace.launched[first - 1] if 0 < first < len(launches) else len(trace.events) * bool(first)
        if back > event:
            late[event] = back
    return late
