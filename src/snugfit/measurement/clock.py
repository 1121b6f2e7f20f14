"""A GPU's clock while steps were timed, from the readings that the sampler took.

A prediction is for a GPU that keeps its clock. Under its power limit, or when it is hot, a GPU lowers it, and
the steps take longer for a reason that no recipe has.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

from snugfit.measurement.nvml import CLOCK_REASONS, Card, NvmlUnavailable
from snugfit.results.measurement import GpuClock


class ClockReading(NamedTuple):
    """What NVML said at one moment."""

    moment: float
    """By the monotonic clock."""
    mhz: int
    """How fast the multiprocessors' clock ran then, in MHz."""
    reasons: int
    """Why it is not higher: NVML's bits."""


def read_clock(card: Card, moment: float) -> ClockReading:
    """The clock now; raises `NvmlUnavailable` where the driver does not report it."""
    return ClockReading(moment, card.clock_mhz(), card.clock_reasons())


def clock_between(
    readings: Iterable[ClockReading], card: Card, begin: float | None, end: float | None
) -> GpuClock | None:
    """The clock between two moments; None where nothing was read then, or they are not known."""
    if begin is None or end is None:
        return None
    within = [one for one in readings if begin <= one.moment <= end]
    try:
        highest = card.highest_clock_mhz()
    except NvmlUnavailable:
        return None
    if not within:
        return None
    shares = {
        name: share
        for name, bits in CLOCK_REASONS.items()
        if (share := sum(bool(one.reasons & bits) for one in within) / len(within))
    }
    return GpuClock(
        mean_mhz=statistics.fmean(one.mhz for one in within),
        lowest_mhz=min(one.mhz for one in within),
        highest_mhz=highest,
        readings=len(within),
        reasons=shares,
    )
