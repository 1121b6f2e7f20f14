"""The sampler: a thread that reads NVML every few milliseconds and keeps what was largest.

It runs in the parent of a measurement, never in the measured process, whose host thread is often what bounds
the step. The caching allocator does not give segments back between steps, so a reading each 10 ms finds the
peak; what lives shorter is a freed-and-retried segment, which `retries` shows. Each quarter of a second it
also takes a census: which processes hold a context, and how much.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from snugfit.measurement.nvml import Card, GpuProcess, NvmlUnavailable

INTERVAL = 0.01
"""Seconds between two readings."""

READINGS_PER_CENSUS = 25
"""A process list is a longer question than a memory reading, so it is asked less often. A choice."""

REFUSALS_ALLOWED = 100
"""After a second of refusals in a row the GPU is lost or NVML is, and we stop asking."""


@dataclass(frozen=True, kw_only=True)
class Census:
    """Who held a context on the GPU at one moment."""

    used_bytes: int
    """All that was used on the device."""

    ours: tuple[GpuProcess, ...]
    """Processes that belong to whoever samples."""

    others: tuple[GpuProcess, ...]
    """All the other processes."""


class Sampler:
    """Reads one card until it is closed; a context manager."""

    def __init__(
        self, card: Card, *, belongs: Callable[[int], bool] = lambda pid: False, interval: float = INTERVAL
    ) -> None:
        self._card, self._belongs, self._interval = card, belongs, interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="snugfit-sampler", daemon=True)
        self.peak_bytes: int | None = None
        """Largest used bytes seen so far; None before the first reading."""
        self.censuses: dict[frozenset[int], Census] = {}
        """For each distinct set of processes, the moment at which the device was fullest."""
        self.refusal: str | None = None
        """Why a reading failed, when one did."""

    def __enter__(self) -> Self:
        self.read()
        self.count()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.read()

    def read(self) -> bool:
        """One reading; False when NVML refused."""
        try:
            used = self._card.memory().used_bytes
        except NvmlUnavailable as reason:
            self.refusal = str(reason)
            return False
        self.peak_bytes = max(self.peak_bytes or 0, used)
        return True

    def count(self) -> None:
        """One census; nothing where the driver does not tell."""
        try:
            processes = self._card.computing()
            used = self._card.memory().used_bytes
        except NvmlUnavailable:
            return
        crowd = frozenset(process.pid for process in processes)
        known = self.censuses.get(crowd)
        if known is None or used > known.used_bytes:
            self.censuses[crowd] = Census(
                used_bytes=used,
                ours=tuple(process for process in processes if self._belongs(process.pid)),
                others=tuple(process for process in processes if not self._belongs(process.pid)),
            )

    def _run(self) -> None:
        readings = refusals = 0
        while not self._stop.wait(self._interval) and refusals < REFUSALS_ALLOWED:
            refusals = 0 if self.read() else refusals + 1
            readings += 1
            if readings % READINGS_PER_CENSUS == 0:
                self.count()
