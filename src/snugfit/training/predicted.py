"""The predicted bytes and seconds of a run, which its journal compares with the measured ones.

The training folder makes no predictions. `frontends/predicted.py` makes them, and the run receives these few
figures to compare each step with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

from snugfit.job.job import Job
from snugfit.techniques.recipe import Recipe
from snugfit.units import show_bytes, show_seconds

TOLERANCE = 1.2
"""Ratio of a measured to a predicted step's seconds, or its inverse, from which the report names the
difference. Nine in ten predictions of the newest drawn jobs are nearer (dev/accuracy.md, seed 20261124)."""


@dataclass(frozen=True, kw_only=True)
class PredictedRun:
    """Predicted bytes and seconds of a job under one recipe."""

    reserved_bytes: int | None
    """Predicted peak of the bytes that the CUDA allocator reserves."""

    step_seconds: float | None
    """Predicted seconds of a steady step (a step like all later ones). None if unknown."""

    peak_seconds: float | None
    """Seconds that the matrix products of one step would take at the GPU's peak speed. None if unknown."""

    samples: int
    """Number of samples in one step."""

    tokens: int
    """Number of tokens in one step; 0 for a job without tokens."""

    doubts: tuple[str, ...] = ()
    """Reasons why the predicted figures are less certain, as sentences."""

    def mfu(self, seconds: float, samples: int, tokens: int) -> float | None:
        """Return the model FLOPs utilisation of a step over this much data; padding does not count as
        work."""
        if not self.peak_seconds or seconds <= 0:
            return None
        share = tokens / self.tokens if self.tokens else samples / self.samples
        return self.peak_seconds * share / seconds

    def to_json(self) -> dict[str, Any]:
        """Return the predicted bytes and seconds as JSON values, for the journal's event `foreseen`."""
        figures = {"reserved_bytes": self.reserved_bytes, "step_seconds": self.step_seconds}
        doubts = {"doubts": list(self.doubts)} if self.doubts else {}
        return {name: value for name, value in figures.items() if value is not None} | doubts


RunAnswer: TypeAlias = PredictedRun | str | None
"""The type of a run's prediction: its figures, the reason why there is none, or None if none was requested.
"""

PredictRun = Callable[[Job, Recipe], "RunAnswer | Future[RunAnswer]"]
"""The type of a function that predicts a job under a recipe. It returns the prediction or its future, so that
training can start meanwhile."""


def predict_nothing(job: Job, recipe: Recipe) -> None:
    """Return None as the prediction of a run; the default function for a run without predictions."""


def compare_with_prediction(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    """Return lines that compare a prediction (a `foreseen` event) with a run's `ended` event.

    A last line reports a large difference.
    """
    lines = []
    if predicted.get("reserved_bytes") and measured.get("reserved_bytes"):
        lines.append(
            f"memory reserved: {show_bytes(predicted['reserved_bytes'])} predicted,"
            f" {show_bytes(measured['reserved_bytes'])} measured"
        )
    expected, took = predicted.get("step_seconds"), measured.get("step_seconds")
    if expected and took:
        lines.append(f"a step: {show_seconds(expected)} predicted, {show_seconds(took)} measured")
        if not 1 / TOLERANCE < took / expected < TOLERANCE:
            lines.append(
                "they differ by more than a fifth. snugfit calibrate measures this machine. Waiting for "
                "data is not predicted."
            )
    return lines
