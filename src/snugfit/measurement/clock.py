"""A GPU's clock, power and temperature while steps were timed, from the readings of the NVML thread.

A GPU lowers its clock at its power limit or when it is hot. A prediction includes the power limit of some
GPUs (`prediction/power.py`), and never heat.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

from snugfit.measurement.nvml import CLOCK_REASONS, Card, NvmlUnavailable
from snugfit.results.measurement import GpuClock


class ClockReading(NamedTuple):
    """One NVML reading of a GPU's clock, with the reasons for a lower clock."""

    moment: float
    """Time of the reading, in seconds of the monotonic clock."""
    mhz: int
    """Frequency in MHz of the clock of the GPU's multiprocessors (SM)."""
    reasons: int
    """Bits by which NVML encodes the reasons for a reduced clock."""
    watts: float | None = None
    """Power that the GPU draws."""
    degrees: float | None = None
    """Temperature of the GPU in degrees Celsius."""


def read_clock(card: Card, moment: float) -> ClockReading:
    """Return the GPU's clock now. Raises `NvmlUnavailable` where the driver does not report it."""
    return ClockReading(
        moment, card.clock_mhz(), card.clock_reasons(), card.power_watts(), card.temperature()
    )


def clock_between(
    readings: Iterable[ClockReading], card: Card, begin: float | None, end: float | None
) -> GpuClock | None:
    """Return the GPU's clock between two times of the monotonic clock; None without a reading between them,
    or without these times.
    """
    if begin is None or end is None:
        return None
    within = [reading for reading in readings if begin <= reading.moment <= end]
    try:
        highest = card.highest_clock_mhz()
    except NvmlUnavailable:
        return None
    if not within:
        return None
    shares = {
        name: share
        for name, bits in CLOCK_REASONS.items()
        if (share := sum(bool(reading.reasons & bits) for reading in within) / len(within))
    }
    return GpuClock(
        mean_mhz=statistics.fmean(reading.mhz for reading in within),
        lowest_mhz=min(reading.mhz for reading in within),
        highest_mhz=highest,
        readings=len(within),
        reasons=shares,
        mean_watts=statistics.fmean(watts) if (watts := _present(within, "watts")) else None,
        highest_degrees=max(_present(within, "degrees"), default=None),
    )


def _present(readings: Iterable[ClockReading], name: str) -> list[float]:
    """Return this field of all readings that have it."""
    return [value for reading in readings if (value := getattr(reading, name)) is not None]
