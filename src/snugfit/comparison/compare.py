"""A prediction beside the measurement of the same experiment, with the errors.

The two hold the same `Footprint`, so a comparison is a subtraction. What either does not know is left out: a
measurement on the CPU has no NVML, a prediction without a GPU no context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from snugfit.errors import MeasurementError, UsageError
from snugfit.results.footprint import Footprint
from snugfit.results.measurement import Measurement
from snugfit.results.prediction import Prediction

SCHEMA = 1
COMPARED = ("requested_bytes", "allocated_bytes", "reserved_bytes", "nvml_bytes", "context_bytes")


@dataclass(frozen=True, kw_only=True)
class ErrorLine:
    """One figure, foreseen and seen."""

    figure: str
    """The footprint's field, or `step_seconds`."""

    predicted: float
    """Foreseen, in bytes or seconds."""

    measured: float
    """Seen."""

    @property
    def error(self) -> float:
        """The share of what was measured by which the prediction is too high."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A prediction and a measurement of one experiment."""

    prediction: Prediction
    """Foreseen."""

    measurement: Measurement
    """Seen."""

    lines: tuple[ErrorLine, ...]
    """The bytes that both know."""

    pace: ErrorLine | None = None
    """The seconds of a step, where both know them."""

    def error(self, figure: str) -> float | None:
        """The error of one figure; None when it is not known."""
        return next((line.error for line in self.lines if line.figure == figure), None)

    @property
    def worst(self) -> ErrorLine | None:
        """The figure that is furthest off, in per cent; None when nothing could be compared."""
        return max(self.lines, key=lambda line: abs(line.error), default=None)

    def to_json(self) -> dict[str, Any]:
        """A JSON object: both documents, and the errors as shares."""
        return {
            "schema": SCHEMA,
            "what": "comparison",
            "prediction": self.prediction.to_json(),
            "measurement": self.measurement.to_json(),
            "errors": {line.figure: line.error for line in (*self.lines, self.pace) if line},
        }


def compare(prediction: Prediction, measurement: Measurement) -> Comparison:
    """The two side by side.

    Raises `UsageError` when they are not of the same experiment, `MeasurementError` when the run died.
    """
    one = (prediction.job, prediction.recipe, prediction.loop)
    other = (measurement.job, measurement.recipe, measurement.loop)
    if one != other:
        raise UsageError("The prediction and the measurement are of different jobs, recipes or loops.")
    if measurement.footprint is None:
        raise MeasurementError(f"There is nothing to compare: the run ended with {measurement.outcome}.")
    lines = error_lines(prediction.footprint, measurement.footprint)
    foreseen, seen = prediction.timing, measurement.timing
    pace = pace_line(foreseen.step_seconds if foreseen else None, seen.step_seconds if seen else None)
    return Comparison(prediction=prediction, measurement=measurement, lines=lines, pace=pace)


def pace_line(foreseen: float | None, seen: float | None) -> ErrorLine | None:
    """The seconds of a step, foreseen beside seen; None when one of them is not known."""
    if not foreseen or not seen:
        return None
    return ErrorLine(figure="step_seconds", predicted=foreseen, measured=seen)


def error_lines(foreseen: Footprint, seen: Footprint) -> tuple[ErrorLine, ...]:
    """The figures that both footprints know."""
    pairs = ((figure, getattr(foreseen, figure), getattr(seen, figure)) for figure in COMPARED)
    return tuple(
        ErrorLine(figure=figure, predicted=predicted, measured=measured)
        for figure, predicted, measured in pairs
        if predicted is not None and measured
    )
