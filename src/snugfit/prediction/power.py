"""The clock of a GPU whose kernels reach its power limit, and their seconds at this clock.

In the steady state of a power-limited step, the GPU's mean power equals its limit:

    P_limit = P_idle + (E_clocked * f + E_bytes) / T(f)
    T(f) = T(1) + T_clocked * (f ** -elasticity - 1)

`f` is the clock as a share of the highest one. `E_clocked` are the joules of the step's arithmetic at the
highest clock. A lower clock comes with a lower voltage, so a FLOP takes energy in proportion to the clock.
`E_bytes` are the joules of the memory traffic. `T_clocked` are the seconds of matrix products, convolutions
and attention. Memory-bound kernels keep their seconds at a lower clock.

The constants of one H200 are in `rates.json`. They are fitted to `results/h200-2026-11-30/power.json`, which
`lab/power_probe.py` measured. There, each kernel runs for seconds without a pause, and for half of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snugfit.documents import JsonFields

if TYPE_CHECKING:
    from snugfit.rehearsal.trace.trace import Kernel

ATTENTION = "attention"
"""Key of `PowerRates.flop_joules` for attention in 16 bits."""

NEWTON_STEPS = 5
"""Iterations of Newton's method for the clock; after them it changes by less than 0.1 %."""

SMALLEST_SLOPE = 1e-30
"""Lower bound of Newton's slope, for steps without arithmetic."""

LOWEST_CLOCK = 0.3
"""Lowest share of the highest clock that is predicted (chosen; an H200's lowest clock under load is higher).
"""


@dataclass(frozen=True, kw_only=True)
class PowerRates(JsonFields):
    """Power and energy of one GPU."""

    limit_watts: float
    """Mean power of a power-limited GPU in its steady state."""
    idle_watts: float
    """Power at the highest clock without kernels."""
    byte_joules: float
    """Energy of a byte that a kernel reads or writes."""
    flop_joules: Mapping[str, float]
    """Energy of a FLOP at the highest clock, by precision of a matrix product, and for `attention`."""
    elasticity: float
    """Exponent of the clock in the seconds of products and attention."""
    highest_mhz: float
    """Highest clock of the multiprocessors in MHz."""

    def energy(self, kernel: Kernel, precision: str) -> tuple[float, float]:
        """Return the joules of a kernel's arithmetic at the highest clock, and of its memory traffic."""
        kind = ATTENTION if ATTENTION in kernel.operator and "16" in precision else precision
        return kernel.flops * self.flop_joules[kind], kernel.nbytes * self.byte_joules

    def clock(self, seconds: Any, work: Sequence[Any]) -> Any:
        """Return the steady clock of a step as a share of the highest clock, at most 1.

        `seconds` are those of the step at the highest clock. `work` are sums of its kernels: clocked seconds,
        joules of arithmetic, and joules of memory traffic. Each is a number or an array of the same shape.
        """
        import numpy as np  # a stored answer is shown without it

        clocked, arithmetic, traffic = work
        spare = self.limit_watts - self.idle_watts
        clock = np.ones_like(seconds, dtype=float)
        for _ in range(NEWTON_STEPS):
            longer = clocked * (clock**-self.elasticity - 1)
            excess = arithmetic * clock + traffic - spare * (seconds + longer)
            slope = arithmetic + spare * clocked * self.elasticity * clock ** (-self.elasticity - 1)
            # Below the limit the excess is negative, and the highest clock remains.
            clock = np.clip(clock - excess / np.maximum(slope, SMALLEST_SLOPE), LOWEST_CLOCK, 1.0)
        return clock

    def slowdown(self, clock: Any) -> Any:
        """Return the factor on the seconds of clocked kernels at this share of the highest clock."""
        return clock**-self.elasticity
