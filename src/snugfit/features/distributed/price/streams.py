"""Timeline of a step whose kernels run in several CUDA streams: computation, and collectives in parallel.

It extends the queue of kernels in `seconds.py` to several streams. The host launches one kernel after the
other. Each stream runs its own in order. A kernel starts after its launch and after the kernels of other
streams that it waits for. While an exchange and another kernel run at once both take longer, since they share
the GPU's multiprocessors and its memory.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence

from snugfit.features.distributed.price.evidence import total
from snugfit.prediction.rates import HostLaunchCosts
from snugfit.prediction.seconds import SIMULATED_STEPS
from snugfit.rehearsal.trace.trace import COLLECTIVES, DEFAULT_STREAM, Kernel


class SimulatedStreams:
    """Simulates the timeline of CUDA streams and of the host that launches their kernels, until further steps
    take the same time.
    """

    def __init__(
        self,
        kernels: Sequence[Kernel],
        device: Sequence[float],
        launches: Sequence[float],
        syncs: Sequence[int],
        host: HostLaunchCosts,
    ) -> None:
        self._kernels, self._device, self._launches = kernels, device, launches
        self._syncs, self._host = sorted(syncs), host
        self._exchanges = [kernel.operator in COLLECTIVES for kernel in kernels]
        self._slowed = total("slowdown", "kernel"), total("slowdown", "exchange")
        self.now = self.host_at = 0.0
        """Simulated time in seconds, and the time of the host's next launch."""
        end = before = 0.0
        for _ in range(SIMULATED_STEPS):
            self._began, before = self.host_at, end
            end = self._run_step()
        self.seconds = end - before
        """Seconds of the steady step (equal to all later ones), from end to end."""

    @property
    def moments(self) -> list[tuple[float, float, float]]:
        """Return three times of each kernel of the last step, in seconds since its beginning: launch, start
        and end.
        """
        moments = zip(self.begins, self.starts, self.ends, strict=True)
        began = self._began
        return [(launch - began, start - began, stop - began) for launch, start, stop in moments]

    def _run_step(self) -> float:
        """Simulate one step to the end of its last kernel, and return that time in seconds."""
        self._waiting: defaultdict[int, deque[int]] = defaultdict(deque)  # launched kernels, by stream
        self._running: dict[int, int] = {}  # index of the running kernel, by stream
        self._running_exchanges = 0
        self._left: dict[int, float] = {}  # seconds that each running kernel still takes if it runs alone
        self.starts: list[float] = [math.nan] * len(self._kernels)
        self.ends: list[float] = [math.nan] * len(self._kernels)
        self.begins: list[float] = [math.nan] * len(self._kernels)
        self.host_at += self._host.step
        syncs = deque(self._syncs)
        for number, kernel in enumerate(self._kernels):
            while syncs and syncs[0] <= number:
                syncs.popleft()
                self._wait_for_default()
            self.begins[number] = self.host_at
            self.host_at += self._launches[number]
            # The streams run while the host launches.
            self._advance(self.host_at)
            waiting = self._waiting[kernel.stream]
            waiting.append(number)
            # A kernel behind another one of its stream starts when that one ends.
            if len(waiting) == 1 and kernel.stream not in self._running:
                self._begin(kernel.stream, waiting)
        for _ in syncs:
            self._wait_for_default()
        while self._running:
            self._advance(self.now + self._next_end())
        self.host_at = max(self.host_at, self.now) if self._syncs else self.host_at
        return max(self.host_at, max(self.ends, default=0.0))

    def _wait_for_default(self) -> None:
        """Advance the simulated time until all launched kernels of the computing stream have ended, since the
        host waits for them.
        """
        while DEFAULT_STREAM in self._running or self._waiting[DEFAULT_STREAM]:
            self._advance(self.now + self._next_end())
        self.host_at = max(self.host_at, self.now) + self._host.wait

    def _rate(self, number: int) -> float:
        """Return the speed of a running kernel: 1 alone, and less while an NCCL kernel and another one share
        the GPU.
        """
        return 1 / self._slowed[self._exchanges[number]]

    def _next_end(self) -> float:
        """Return the seconds until the first running kernel ends."""
        # Kernels slow each other down only if an exchange and another kernel run concurrently.
        if not 0 < self._running_exchanges < len(self._left):
            return min(self._left.values())
        return min(left / self._rate(number) for number, left in self._left.items())

    def _advance(self, moment: float) -> None:
        """Advance the simulated streams to the time `moment`, in seconds."""
        left, now = self._left, self.now
        while left:
            share = 0 < self._running_exchanges < len(left)
            if len(left) == 1:
                step = next(iter(left.values()))
            elif share:
                step = self._next_end()
            else:
                step = min(left.values())
            if now + step > moment:
                break
            self._pass(step, share=share)
            now = self.now = now + step
            self._end_what_is_done()
        if left and moment > now:
            self._pass(moment - now, share=0 < self._running_exchanges < len(left))
        self.now = max(now, moment)

    def _end_what_is_done(self) -> None:
        """Record the end of finished kernels in the simulated streams, and start the kernels that waited for
        them.
        """
        left, running = self._left, self._running
        for stream, number in [*running.items()]:
            if left[number] <= 1e-12:  # seconds that remain by rounding errors
                self.ends[number] = self.now
                self._running_exchanges -= self._exchanges[number]
                del running[stream], left[number]
        for stream, waiting in self._waiting.items():
            if waiting and stream not in running:
                self._begin(stream, waiting)

    def _pass(self, seconds: float, *, share: bool) -> None:
        for number in self._left:
            self._left[number] -= seconds * self._rate(number) if share else seconds

    def _begin(self, stream: int, waiting: deque[int]) -> None:
        """Start the first waiting kernel of an idle stream, if it is launched and the kernels that it waits
        for have ended.
        """
        number = waiting[0]
        after = self._kernels[number].after
        # A kernel without an end has not run yet.
        if after and any(math.isnan(self.ends[other]) for other in after):
            return
        waiting.popleft()
        self._running[stream] = number
        self._running_exchanges += self._exchanges[number]
        self._left[number] = max(self._device[number], 1e-9)
        self.starts[number] = self.now
