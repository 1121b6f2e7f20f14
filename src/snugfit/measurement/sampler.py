"""A thread that reads a GPU's used memory from NVML every few milliseconds and stores the peak.

The thread runs in the parent process of a measurement. In the measured process it would delay the host
thread, which often limits the speed of a step. The caching allocator does not return segments between steps,
so readings every 10 ms find the peak. Only a segment that is freed for an allocation retry may be missed, and
`retries` shows it. Every quarter of a second the thread also records the processes with a CUDA context, and
the bytes of each.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from snugfit.measurement.clock import ClockReading, read_clock
from snugfit.measurement.nvml import Card, GpuProcess, NvmlUnavailable

INTERVAL = 0.01
"""Seconds between two readings of the GPU's used memory."""

READINGS_PER_CENSUS = 25
"""Number of memory readings per list of GPU processes (chosen). Such a list takes longer than a memory
reading."""

READINGS_PER_CLOCK = 5
"""Number of memory readings per reading of the GPU's clock (chosen). Steps may be timed for less than half a
second, so the clock is read throughout."""

MAX_REFUSALS = 100
"""Number of successive failed readings, over one second, after which sampling stops. The GPU or NVML is then
lost."""


@dataclass(frozen=True, kw_only=True)
class Census:
    """The processes with a CUDA context on the GPU at one moment, and their bytes."""

    used_bytes: int
    """Bytes that all processes use on the device."""

    own: tuple[GpuProcess, ...]
    """GPU processes of this measurement, for which `belongs` returns True."""

    foreign: tuple[GpuProcess, ...]
    """All other processes on the GPU."""


class Sampler:
    """A thread that reads one GPU's used memory until it is closed, as a context manager."""

    def __init__(
        self,
        card: Card,
        *,
        belongs: Callable[[int], bool] = lambda pid: False,
        interval: float = INTERVAL,
        also: Callable[[], None] = lambda: None,
    ) -> None:
        # `also` is called after each process list that the thread reads.
        self._card, self._belongs, self._interval, self._also = card, belongs, interval, also
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="snugfit-sampler", daemon=True)
        self.peak_bytes: int | None = None
        """Largest used bytes of the device so far; None before the first reading."""
        self._rises: list[tuple[float, int]] = []
        """Each increase of the device's largest used bytes: its time in seconds of the monotonic clock, and
        the bytes."""
        self.censuses: dict[frozenset[int], Census] = {}
        """The process list with the most used bytes, for each distinct set of process ids."""
        self.refusal: str | None = None
        """Reason why the last reading failed; None if none failed."""
        self.clocks: list[ClockReading] = []
        """Readings of the clock of the GPU's multiprocessors (SM); empty if the driver does not report it."""

    def __enter__(self) -> Self:
        # Even a short run gets one memory reading and one process list.
        self.read()
        self.count()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        # The used bytes may have grown since the thread's last reading.
        self.read()

    def read(self) -> bool:
        """Read the GPU's used bytes once. Return False if NVML does not answer."""
        try:
            used = self._card.memory().used_bytes
        except NvmlUnavailable as reason:
            self.refusal = str(reason)
            return False
        if self.peak_bytes is None or used > self.peak_bytes:
            self.peak_bytes = used
            self._rises.append((time.monotonic(), used))
        return True

    def peak_until(self, moment: float | None) -> int | None:
        """Return the peak of the GPU's used memory until `moment` of the monotonic clock, or of all readings
        for None. Return None before the first reading.
        """
        rises = (used for when, used in self._rises if moment is None or when <= moment)
        return max(rises, default=None)

    def count(self) -> None:
        """Record the processes on the GPU once; no effect where the driver hides them."""
        try:
            processes = self._card.compute_processes()
            used = self._card.memory().used_bytes
        except NvmlUnavailable:
            return
        pids = frozenset(process.pid for process in processes)
        fullest = self.censuses.get(pids)
        if fullest is None or used > fullest.used_bytes:
            self.censuses[pids] = Census(
                used_bytes=used,
                own=tuple(process for process in processes if self._belongs(process.pid)),
                foreign=tuple(process for process in processes if not self._belongs(process.pid)),
            )

    def _run(self) -> None:
        readings = refusals = 0
        while not self._stop.wait(self._interval) and refusals < MAX_REFUSALS:
            refusals = 0 if self.read() else refusals + 1
            readings += 1
            if readings % READINGS_PER_CLOCK == 0:
                with suppress(NvmlUnavailable):
                    self.clocks.append(read_clock(self._card, time.monotonic()))
            if readings % READINGS_PER_CENSUS == 0:
                self.count()
                self._also()
