"""A calibration in a terminal: each probe, predicted and measured, and what it corrected."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from snugfit.comparison.calibrate import ProbeReading
from snugfit.prediction.rates import Rates
from snugfit.report.text.terminal import table
from snugfit.units import show_seconds


def render(rates: Rates, readings: Sequence[ProbeReading]) -> Table:
    """One row a probe."""
    rows = [
        (
            reading.probe.corrects,
            reading.probe.recipe,
            show_seconds(reading.predicted_seconds),
            show_seconds(reading.measured_seconds) if reading.measured_seconds else "",
            f"{reading.factor:.2f}" if reading.factor else reading.why,
        )
        for reading in readings
    ]
    heads = ("Probe", "Recipe", "predicted>", "measured>", "factor>")
    return table(heads, rows, title=f"{rates.gpu}: seconds of a step before and after")
