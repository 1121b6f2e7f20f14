"""How far a step's measured seconds lie from the predicted ones: what nine in ten measured steps kept to.

The errors are `predicted / measured - 1` of the 66 drawn steps of seed 20261124 on an H200, forecast after
its calibration (README.md and docs/accuracy.md), by what was predicted to bound the step.
"""

from __future__ import annotations

from typing import NamedTuple

GPU_BOUND = 0.064
HOST_BOUND = 0.204
ANY_BOUND = 0.170
"""Where it is not known what bounds the step."""

SCALED = 0.35
"""On a GPU whose rates were scaled by data sheet: the guide's published speeds of a V100 are within it
(docs/seconds.md)."""


class SecondsSpread(NamedTuple):
    """Between which seconds a step lies."""

    low: float
    high: float


def spread_of(seconds: float, *, bound: str, measured_rates: bool) -> SecondsSpread:
    """The spread of predicted seconds: `bound` is what bounds the step (`StepSeconds.bound`; empty where that
    is not known), `measured_rates` whether its GPU was measured."""
    by_bound = {"host": HOST_BOUND, "loading": HOST_BOUND, "": ANY_BOUND}
    error = by_bound.get(bound, GPU_BOUND) if measured_rates else SCALED
    return SecondsSpread(seconds / (1 + error), seconds / (1 - error))
