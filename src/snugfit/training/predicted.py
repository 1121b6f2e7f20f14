"""What was predicted of a run, as its journal and whoever watches it need it.

Training predicts nothing itself (that is made above it, in `frontends/predicted.py`); it is given these few
figures, so that each step can be compared with them.
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
"""Factor between a measured step and its prediction from which the difference is pointed out: nine in ten
predictions of the newest drawn jobs are nearer (docs/accuracy.md, seed 20261124)."""


@dataclass(frozen=True, kw_only=True)
class PredictedRun:
    """The figures of a prediction of a job under one recipe."""

    reserved_bytes: int | None
    """What the allocator will have reserved at most."""

    step_seconds: float | None
    """Of a steady step; None where they are not known."""

    peak_seconds: float | None
    """What the model's arithmetic of such a step would take at the GPU's peak."""

    samples: int
    """Samples of such a step."""

    tokens: int
    """Tokens of such a step; 0 where there are none."""

    doubts: tuple[str, ...] = ()
    """What is less certain in them."""

    def mfu(self, seconds: float, samples: int, tokens: int) -> float | None:
        """Model FLOPs utilisation of a step over so much data; padding is no work that counts."""
        if not self.peak_seconds or seconds <= 0:
            return None
        share = tokens / self.tokens if self.tokens else samples / self.samples
        return self.peak_seconds * share / seconds

    def to_json(self) -> dict[str, Any]:
        """The figures of a `foreseen` event."""
        figures = {"reserved_bytes": self.reserved_bytes, "step_seconds": self.step_seconds}
        doubts = {"doubts": list(self.doubts)} if self.doubts else {}
        return {name: value for name, value in figures.items() if value is not None} | doubts


RunAnswer: TypeAlias = PredictedRun | str | None
"""What is predicted of a run; why nothing can be; or None where nobody asked."""

PredictRun = Callable[[Job, Recipe], "RunAnswer | Future[RunAnswer]"]
"""Predicts a job under a recipe: at once, or while the run begins."""


def predict_nothing(job: Job, recipe: Recipe) -> None:
    """The `PredictRun` of a run that nobody wants predicted."""


def compare_with_prediction(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    """Lines that compare what was predicted (a `foreseen` event) with what a run took (its `ended` event); a
    last one where they differ by much."""
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
