"""Compare a prediction with the measurement of the same experiment.

Both contain a `Footprint`, so each figure is divided by its counterpart. Figures that one side lacks are
omitted: NVML bytes on a CPU, or the context of a prediction without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, overload

from snugfit.comparison.recipes import RecipeComparison
from snugfit.errors import MeasurementError, UsageError
from snugfit.job.job import Job
from snugfit.results.footprint import Footprint
from snugfit.results.frame import Tabular
from snugfit.results.measurement import Measurement
from snugfit.results.prediction import Prediction
from snugfit.techniques.recipe import Recipe

SCHEMA = 1
COMPARED = ("requested_bytes", "allocated_bytes", "reserved_bytes", "nvml_bytes", "context_bytes")


@dataclass(frozen=True, kw_only=True)
class ErrorLine:
    """One predicted and measured quantity with its error, in bytes or seconds."""

    figure: str
    """Name of the compared figure: a field of `Footprint`, or `step_seconds`."""
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The relative error, predicted / measured - 1; positive when the prediction is too high."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class Comparison(Tabular):
    """A prediction and a measurement of one experiment."""

    prediction: Prediction
    measurement: Measurement
    lines: tuple[ErrorLine, ...]
    """Errors of the predicted bytes, one line for each figure that prediction and measurement both have."""
    pace: ErrorLine | None = None
    """Error of the predicted seconds of a step; None when prediction or measurement has none."""

    def error(self, figure: str) -> float | None:
        """Return the relative error of one figure, such as the step time; None when it is not known."""
        return next((line.error for line in self.lines if line.figure == figure), None)

    @property
    def worst(self) -> ErrorLine | None:
        """The figure with the largest relative error; None when nothing could be compared."""
        return max(self.lines, key=lambda line: abs(line.error), default=None)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each figure that both sides contain."""
        lines = [line for line in (*self.lines, self.pace) if line]
        return [asdict(line) | {"error": line.error} for line in lines]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with the prediction, the measurement and the relative errors."""
        return {
            "schema": SCHEMA,
            "what": "comparison",
            "prediction": self.prediction.to_json(),
            "measurement": self.measurement.to_json(),
            "errors": {line.figure: line.error for line in (*self.lines, self.pace) if line},
        }


@overload
def compare(prediction: Prediction, measurement: Measurement) -> Comparison: ...


@overload
def compare(prediction: Job, measurement: Iterable[Recipe | str], **question: Any) -> RecipeComparison: ...


def compare(
    prediction: Prediction | Job, measurement: Measurement | Iterable[Recipe | str], **question: Any
) -> Comparison | RecipeComparison:
    """Return the errors of a prediction against its measurement, or one job's predictions under several
    recipes.

        snugfit.compare(snugfit.predict(job, "bf16", gpu="h200"), snugfit.measure(job, "bf16"))
        snugfit.compare(job, ["plain", "bf16"], gpu="h200")

    Further arguments for recipes (`gpu`, `memory_bytes`, `loop` ...) are those of `snugfit.predict`. Raises
    `UsageError` when the two belong to different experiments, `MeasurementError` when the run died.
    """
    if isinstance(prediction, Prediction) and isinstance(measurement, Measurement):
        return _beside(prediction, measurement)
    # A text is iterable too, but not a list of recipes.
    no_list = isinstance(measurement, Measurement | str | Recipe)
    if not isinstance(prediction, Job) or no_list or not isinstance(measurement, Iterable):
        kinds = " and ".join(type(given).__name__ for given in (prediction, measurement))
        raise UsageError(
            "compare needs a prediction and its measurement, or a job and a list of recipes such as "
            f"['plain', 'bf16'], not {kinds}."
        )
    from snugfit.prediction.predict import predict

    predictions = tuple(predict(prediction, recipe, **question) for recipe in measurement)
    if not predictions:
        raise UsageError("compare: the list of recipes is empty. Name at least one, such as 'bf16'.")
    return RecipeComparison(predictions)


def _beside(prediction: Prediction, measurement: Measurement) -> Comparison:
    if other := "; ".join(_differences(prediction, measurement)):
        raise UsageError(
            f"The prediction and the measurement belong to different experiments: {other}. Predict the "
            "measured one: snugfit.predict(measurement.job, measurement.recipe, loop=measurement.loop, "
            "gpu=..., gpus=measurement.gpus)."
        )
    if measurement.footprint is None:
        raise MeasurementError(
            f"Nothing to compare: the run ended with {measurement.outcome}. Measure again."
        )
    lines = error_lines(prediction.footprint, measurement.footprint)
    pace = step_seconds_line(
        prediction.timing.step_seconds if prediction.timing else None,
        measurement.timing.step_seconds if measurement.timing else None,
    )
    return Comparison(prediction=prediction, measurement=measurement, lines=lines, pace=pace)


def _differences(prediction: Prediction, measurement: Measurement) -> Iterator[str]:
    """Yield a sentence for each difference between the predicted and the measured experiment.

    The dtype in the checkpoint's file is not compared. The job names the dtype of the loaded weights, and
    earlier measurements did not record the file's.
    """
    jobs = (prediction.job, measurement.job)
    names = [entry.name for entry in fields(Job) if entry.compare]
    pairs = {name: tuple(getattr(job, name) for job in jobs) for name in names}
    models = pairs.pop("model")
    if len({replace(model, dtype=None) for model in models}) > 1:
        one, other = (model.name for model in models)
        same_name = "the models have different configurations" if one == other else ""
        yield same_name or f"model is {one} predicted and {other} measured"
    pairs |= {"recipe": (prediction.recipe, measurement.recipe), "loop": (prediction.loop, measurement.loop)}
    pairs["gpus"] = (prediction.gpus, measurement.gpus)
    yield from (f"{name} is {a} predicted and {b} measured" for name, (a, b) in pairs.items() if a != b)


def step_seconds_line(predicted: float | None, measured: float | None) -> ErrorLine | None:
    """Return the predicted and measured seconds of a step as an `ErrorLine`; None when one of the two is not
    known.
    """
    if not predicted or not measured:
        return None
    return ErrorLine(figure="step_seconds", predicted=predicted, measured=measured)


def error_lines(predicted: Footprint, measured: Footprint) -> tuple[ErrorLine, ...]:
    """Return the predicted and measured bytes that both footprints contain, for their comparison.

    Managed memory and NCCL's buffers count as context. Older measurements do not separate managed memory, and
    a measurement records only the first exchange's share of NCCL's buffers.
    """
    pairs = ((figure, _bytes_of(predicted, figure), _bytes_of(measured, figure)) for figure in COMPARED)
    return tuple(
        ErrorLine(figure=figure, predicted=before, measured=after)
        for figure, before, after in pairs
        # The relative error is undefined for a measured 0.
        if before is not None and after
    )


def _bytes_of(footprint: Footprint, figure: str) -> int | None:
    nbytes: int | None = getattr(footprint, figure)
    if figure == "context_bytes" and nbytes is not None:
        return nbytes + footprint.managed_bytes + footprint.communication_bytes
    return nbytes
