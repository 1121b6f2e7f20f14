"""What was foreseen of a run, as its journal and whoever watches it need it.

Training foresees nothing itself (a prediction is made above it, in `frontends/predicted.py`); it is told
these few figures, so that each step can be laid beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from snugfit.job.job import Job
from snugfit.techniques.recipe import Recipe
from snugfit.units import show_bytes, show_seconds

APART = 1.2
"""A measured step beside its prediction from which it is told that they part: nine in ten predictions of the
newest drawn jobs are nearer (docs/accuracy.md, seed 20261124)."""


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """A prediction of a job under one recipe."""

    reserved_bytes: int | None
    """What the allocator will have reserved at most."""

    step_seconds: float | None
    """Of a steady step; None where they are not known."""

    peak_seconds: float | None
    """What the model's arithmetic of such a step would take at the GPU's peak."""

    samples: int
    """Of such a step."""

    tokens: int
    """Likewise; 0 where there are none."""

    def mfu(self, seconds: float, samples: int, tokens: int) -> float | None:
        """Model FLOPs utilisation of a step over so much data; what is padding does no work that counts."""
        if not self.peak_seconds or seconds <= 0:
            return None
        share = tokens / self.tokens if self.tokens else samples / self.samples
        return self.peak_seconds * share / seconds

    def to_json(self) -> dict[str, Any]:
        """What is told of it."""
        told = {"reserved_bytes": self.reserved_bytes, "step_seconds": self.step_seconds}
        return {name: value for name, value in told.items() if value is not None}


Foresee = Callable[[Job, Recipe], "Foreseen | str | None"]
"""What is foreseen of a job under a recipe; why nothing can be; or None where nobody asked."""


def nothing_foreseen(job: Job, recipe: Recipe) -> None:
    """For who does not ask."""


def beside(foreseen: Mapping[str, Any], seen: Mapping[str, Any]) -> list[str]:
    """Lines that lay what was foreseen (a `foreseen` event) beside what a run took (its `ended` event); a
    last one where they part."""
    lines = []
    if foreseen.get("reserved_bytes") and seen.get("reserved_bytes"):
        lines.append(
            f"memory reserved: {show_bytes(foreseen['reserved_bytes'])} predicted,"
            f" {show_bytes(seen['reserved_bytes'])} measured"
        )
    expected, took = foreseen.get("step_seconds"), seen.get("step_seconds")
    if expected and took:
        lines.append(f"a step: {show_seconds(expected)} predicted, {show_seconds(took)} measured")
        if not 1 / APART < took / expected < APART:
            lines.append(
                "they differ by more than a fifth: snugfit calibrate measures this machine, and the time"
                " spent waiting for data is not predicted"
            )
    return lines
