"""What a draw leaves: runs with what was foreseen and what was seen, and the band they must lie in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from snugfit.comparison.compare import ErrorLine, error_lines, pace_line
from snugfit.job.job import Job
from snugfit.step.footprint import Footprint
from snugfit.techniques.recipe import Recipe

SCHEMA = 1
BAND: Mapping[str, float] = {"allocated_bytes": 0.005, "reserved_bytes": 0.03, "nvml_bytes": 0.03}
"""The largest error that a drawn run may have, as a share of what was measured."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One drawn job and recipe: foreseen, and seen."""

    number: int
    """Of the draw, from 0."""

    family: str
    """Its model's."""

    job: Job
    """What was trained."""

    recipe: Recipe
    """How."""

    passed_over: tuple[str, ...] = ()
    """Recipes that were drawn before it and cannot go with the job, each with the reason."""

    predicted: Footprint | None = None
    """Foreseen; None when it could not be predicted."""

    fits: bool | None = None
    """Whether it was foreseen to fit."""

    predicted_step_seconds: float | None = None
    """Foreseen length of a steady step."""

    bound: str | None = None
    """What was foreseen to bound it: `host`, or an operator group."""

    refused: str = ""
    """Why it could not be predicted."""

    doubts: tuple[str, ...] = ()
    """What the prediction calls less certain."""

    prediction_seconds: float | None = None
    """Wall time of the prediction, imports apart."""

    outcome: str | None = None
    """How the measured run ended; None when it was not measured."""

    measured: Footprint | None = None
    """Seen."""

    step_seconds: float | None = None
    """Median of the steady steps."""

    spread: float | None = None
    """(90th percentile - 10th percentile) / median of the steady steps."""

    contaminated: str | None = None
    """Why the GPU was not this run's alone, when it was not."""

    message: str = ""
    """What a run said that died."""

    when: str | None = None
    """Start of the measured run."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the measured run's packages."""

    @property
    def lines(self) -> tuple[ErrorLine, ...]:
        """The figures that are known on both sides, of a run that ended as it should."""
        if self.outcome != "ok" or self.predicted is None or self.measured is None:
            return ()
        pace = pace_line(self.predicted_step_seconds, self.step_seconds)
        return (*error_lines(self.predicted, self.measured), *([pace] if pace else []))

    def error(self, figure: str) -> float | None:
        """The error of one figure, as a share; None when it is not known."""
        return next((line.error for line in self.lines if line.figure == figure), None)

    @property
    def complaint(self) -> str | None:
        """Why this run is outside the band; None when it is inside, or was not measured."""
        if self.outcome is None:
            return f"not predicted: {self.refused}" if self.refused else None
        if self.outcome != "ok":
            expected = self.fits is False and self.outcome.startswith("oom")
            return None if expected else f"the run ended with {self.outcome}"
        if self.predicted is None:
            return f"not predicted: {self.refused}"
        if self.fits is False:
            return "foreseen not to fit, and it did"
        off = [
            f"{line.figure.removesuffix('_bytes')} {100 * line.error:+.2f} %"
            for line in self.lines
            if abs(line.error) > BAND.get(line.figure, 1)
        ]
        missing = [figure for figure in BAND if self.error(figure) is None]
        off += [f"{figure} not measured" for figure in missing]
        if off and self.contaminated:
            off.append(f"but the GPU was not this run's alone: {self.contaminated}")
        return ", ".join(off) or None

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `Run.from_json` reads it back."""
        errors = {line.figure: line.error for line in self.lines}
        return {
            **{declared.name: getattr(self, declared.name) for declared in fields(self)},
            "job": self.job.to_json(),
            "recipe": str(self.recipe),
            "predicted": self.predicted.to_json() if self.predicted else None,
            "measured": self.measured.to_json() if self.measured else None,
            "versions": dict(self.versions),
            "errors": errors,
            "complaint": self.complaint,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The run that `to_json` wrote."""
        values = {name: value for name, value in document.items() if name not in ("errors", "complaint")}
        for name in ("predicted", "measured"):
            values[name] = Footprint.from_json(values[name]) if values[name] else None
        for name in ("passed_over", "doubts"):
            values[name] = tuple(values[name])
        values["job"], values["recipe"] = Job.from_json(values["job"]), Recipe.parse(values["recipe"])
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """A whole draw."""

    seed: int
    """That it was drawn from."""

    gpu: str
    """Predicted for."""

    device: str | None
    """Measured on; None when nothing was measured."""

    versions: Mapping[str, str]
    """Of the packages that predicted."""

    runs: tuple[Run, ...]
    """In the order of their numbers."""

    @property
    def outside(self) -> tuple[Run, ...]:
        """The runs that are outside the band, or failed."""
        return tuple(run for run in self.runs if run.complaint)

    def errors(self, figure: str) -> list[float]:
        """Sizes of the errors of one figure, the smallest first."""
        found = (run.error(figure) for run in self.runs)
        return sorted(abs(error) for error in found if error is not None)

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `Accuracy.from_json` reads it back."""
        return {
            "schema": SCHEMA,
            "what": "accuracy",
            "seed": self.seed,
            "gpu": self.gpu,
            "device": self.device,
            "band": dict(BAND),
            "versions": dict(self.versions),
            "runs": [run.to_json() for run in self.runs],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The draw that `to_json` wrote."""
        values = {name: document[name] for name in ("seed", "gpu", "device", "versions")}
        return cls(**values, runs=tuple(Run.from_json(run) for run in document["runs"]))


def quantiles(errors: list[float], shares: Iterable[float] = (0.5, 0.9, 1.0)) -> Iterator[float | None]:
    """The smallest error that is not exceeded by each share of the runs; None without runs."""
    for share in shares:
        yield errors[max(0, math.ceil(round(share * len(errors), 6)) - 1)] if errors else None
