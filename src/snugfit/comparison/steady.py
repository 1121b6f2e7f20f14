"""How many steps a run is measured: a host that others use too is slow and fast by turns, some tenths of a
second to some seconds each, so steady steps go on for a while, however short they are. What the device bounds
is as long each time."""

from __future__ import annotations

import math

WARMUP = 3
"""States are born at the end of the first step, and the second is like all later ones."""

FEWEST, MOST = 8, 400
STEADY_SECONDS = 2.0
SHORT_SECONDS = 1.0
"""Where the device bounds."""


def steady_steps(step_seconds: float | None, *, host: bool = True) -> int:
    """Steps that go on for long enough when one is foreseen to take so long, and the host to bound it."""
    if not step_seconds:
        return FEWEST
    seconds = STEADY_SECONDS if host else SHORT_SECONDS
    return max(FEWEST, min(MOST, math.ceil(seconds / step_seconds)))
