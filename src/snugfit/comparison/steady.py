"""How many steps a run is measured: a host that others use too is slow and fast by turns, some tenths of a
second each, so steady steps go on for a while, however short they are."""

from __future__ import annotations

import math

WARMUP = 3
"""States are born at the end of the first step, and the second is like all later ones."""

FEWEST, MOST = 8, 60
STEADY_SECONDS = 1.5


def steady_steps(step_seconds: float | None) -> int:
    """Steps that take about `STEADY_SECONDS`, when one is foreseen to take so long."""
    if not step_seconds:
        return FEWEST
    return max(FEWEST, min(MOST, math.ceil(STEADY_SECONDS / step_seconds)))
