"""Training runs with a predicted and a measured memory and step time, and the allowed errors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from snugfit.comparison.compare import ErrorLine, error_lines, step_seconds_line
from snugfit.documents import JsonDocument, JsonFields, decode_fields, encode_fields
from snugfit.job.job import Job
from snugfit.results.footprint import Footprint
from snugfit.results.measurement import GpuClock
from snugfit.techniques.recipe import Recipe

SCHEMA = 2
READABLE = (1, 2)
"""Versions of the result format that can be read. Version 1 had neither several recipes per job nor rescored
predictions."""

BAND: Mapping[str, float] = {"allocated_bytes": 0.005, "reserved_bytes": 0.03, "nvml_bytes": 0.03}
"""Largest accepted relative error of the predicted peak bytes of a randomly drawn run, by kind of bytes."""


@dataclass(frozen=True, kw_only=True)
class ComparedRun(JsonFields):
    """One training job and recipe, with its predicted and measured memory and step time where they exist."""

    number: int
    """Position of the run in the random draw, from 0."""
    family: str
    """The model family's name in the draw; without one, the architecture's name."""
    job: Job
    recipe: Recipe
    gpus: int = 1
    """Number of GPUs that train together, for the prediction and the measurement."""
    passed_over: tuple[str, ...] = ()
    """Recipes drawn before this one that the model does not support, with the reason for each."""

    predicted: Footprint | None = None
    """Predicted peak bytes; None if the prediction failed."""
    fits: bool | None = None
    """True if the predicted bytes fit into the GPU's memory."""
    predicted_step_seconds: float | None = None
    """Predicted seconds of a steady step (a step like all later ones)."""
    bound: str | None = None
    """Predicted bottleneck of the step: `host`, or a group of operators."""
    refused: str = ""
    """Reason for which the run could not be predicted; empty if it was."""
    doubts: tuple[str, ...] = ()
    """Sentences on uncertainties of the prediction."""
    prediction_seconds: float | None = None
    """Wall-clock seconds of the prediction, without imports."""

    outcome: str | None = None
    """Outcome of the measured run, such as `ok` or an out-of-memory error. None if it was not measured."""
    measured: Footprint | None = None
    step_seconds: float | None = None
    """Mean measured seconds of a steady step, without steps that other processes disturbed."""
    every_step_seconds: float | None = None
    """Mean measured seconds of all steady steps, including disturbed ones. None in results older than this
    field."""
    spread: float | None = None
    """Relative spread of the steady steps' seconds: (90th percentile - 10th percentile) / mean."""
    contaminated: str | None = None
    """Description of other processes that used the GPU during the run; None without any."""
    message: str = ""
    """Last lines of output of a run that failed."""
    when: str | None = None
    """Date and time in UTC (ISO 8601) at which the measured run started."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package versions of the measured run."""
    crowded: str | None = None
    """Share of the host's cores used by other processes while steps were timed. None if some core was idle.
    """
    disturbed: float | None = None
    """Share of the checks in which other processes slowed down the core of the training loop."""
    clock: GpuClock | None = None
    """Clock frequency of the GPU while steps were timed, as in `Measurement`."""
    host_loop_seconds: float | None = None
    """Median seconds of a short loop of pure Python, which show the speed of the core."""
    cause: str = ""
    """Known cause of a large error. It is the only field that a developer writes into a result by hand."""

    original: Footprint | None = None
    """First predicted peak bytes of a rescored run (predicted again by a later version)."""
    original_step_seconds: float | None = None
    """First predicted seconds of a step of a rescored run (predicted again by a later version)."""

    added_keys: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "job_id": (str, ""),
        "errors": (Mapping[str, float], "predicted / measured - 1, by figure."),
        "complaint": (str | None, ""),
    }
    """JSON keys that `to_json` adds to the fields, with types and descriptions
    (`features/schema/json_schema.py`)."""

    @property
    def job_id(self) -> str:
        """A hash of the training job; runs of one job have the same."""
        text = json.dumps(self.job.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def seconds(self) -> tuple[float, float] | None:
        """Predicted and measured seconds of a step; None when the run died or one of the two is missing."""
        if self.outcome != "ok" or not self.predicted_step_seconds or not self.step_seconds:
            return None
        return self.predicted_step_seconds, self.step_seconds

    @property
    def lines(self) -> tuple[ErrorLine, ...]:
        """The quantities (bytes, seconds) that are both predicted and measured; none for a run that died."""
        if self.outcome != "ok" or self.predicted is None or self.measured is None:
            return ()
        seconds = step_seconds_line(self.predicted_step_seconds, self.step_seconds)
        return (*error_lines(self.predicted, self.measured), *([seconds] if seconds else []))

    def error(self, figure: str) -> float | None:
        """Return the relative error of one predicted quantity, such as the step time; None when it is
        missing.
        """
        return next((line.error for line in self.lines if line.figure == figure), None)

    @property
    def complaint(self) -> str | None:
        """Sentence on a prediction error that exceeds the allowed one, or on a failed run; None without
        either.
        """
        if self.outcome is None:
            return f"not predicted: {self.refused}" if self.refused else None
        if self.outcome != "ok":
            # An out-of-memory error is the expected outcome if the run was predicted not to fit.
            expected = self.fits is False and self.outcome.startswith("oom")
            return None if expected else f"the run ended with {self.outcome}"
        if self.predicted is None:
            return f"not predicted: {self.refused}"
        if self.fits is False:
            return "predicted not to fit, and it did"
        off = [
            f"{line.figure.removesuffix('_bytes')} {100 * line.error:+.2f} %"
            for line in self.lines
            if abs(line.error) > BAND.get(line.figure, 1)
        ]
        missing = [figure for figure in BAND if self.error(figure) is None]
        off += [f"{figure} not measured" for figure in missing]
        if off and self.contaminated:
            off.append(f"but other processes used the GPU: {self.contaminated}")
        return ", ".join(off) or None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; `ComparedRun.from_json` reads it back."""
        errors = {line.figure: line.error for line in self.lines}
        return encode_fields(self, job_id=self.job_id, errors=errors, complaint=self.complaint)


@dataclass(frozen=True, kw_only=True)
class Accuracy(JsonDocument):
    """Result of `snugfit accuracy`: all its runs, with predicted and measured memory and step time."""

    what: ClassVar = "accuracy"
    schema: ClassVar = SCHEMA

    seed: int | None
    """Seed of the random draw of jobs; None when the user named the jobs."""
    gpu: str
    """Name of the GPU that the predictions are for."""
    device: str | None
    """Name of the measured GPU; None when nothing was measured."""
    versions: Mapping[str, str]
    """Versions of the packages with which the runs were predicted."""
    runs: tuple[ComparedRun, ...]
    """Predicted and measured runs in the order of their numbers."""
    kind: str = "drawn"
    """Selection of the runs. `drawn`: one random recipe per job; `within-job`: several random recipes per
    job; `top`: each job's best recipes."""
    rates: str = ""
    """Source of the GPU speeds from which the seconds were predicted."""
    rescored: str = ""
    """Date and versions of a later prediction of the same runs, which is no forecast. Empty without one."""
    original_versions: Mapping[str, str] = field(default_factory=dict)
    """Package versions of the first predictions of a rescored result."""

    added_keys: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "band": (Mapping[str, float], "Largest relative error within the allowed ones, by figure."),
    }

    @property
    def outside(self) -> tuple[ComparedRun, ...]:
        """The runs whose errors exceed the allowed ones, or that failed."""
        return tuple(run for run in self.runs if run.complaint)

    def errors(self, figure: str) -> list[float]:
        """Return the absolute relative errors of one quantity, such as the step time, the smallest first."""
        errors = (run.error(figure) for run in self.runs)
        return sorted(abs(error) for error in errors if error is not None)

    def derived_keys(self) -> dict[str, Any]:
        """Return the allowed relative error of each quantity, for the JSON document."""
        return {"band": dict(BAND)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the accuracy result that `to_json` wrote."""
        return decode_fields(cls, document)


def error_quantiles(errors: list[float]) -> Iterator[float | None]:
    """Yield the bounds that half, nine tenths and all of the errors do not exceed; None without errors."""
    import numpy as np

    for share in (0.5, 0.9, 1.0):
        # This method returns one of the errors, without interpolation between two.
        yield float(np.quantile(errors, share, method="inverted_cdf")) if errors else None
