"""Predictions for the guide's experiments, about forty, in parallel processes.

A simulation is Python on one core. Each request is plain data. Its result is a prediction, or the reason why
there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from snugfit.errors import SnugfitError
from snugfit.prediction.predict import predict
from snugfit.prediction.worker_pool import map_in_processes
from snugfit.techniques.recipe import Recipe

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.results.prediction import Prediction


@dataclass(frozen=True, kw_only=True)
class PredictionRequest:
    """A prediction that the guide's tables need: an experiment, a GPU and package versions."""

    about: str
    """Name of the predicted experiment or technique, for progress messages."""
    job: Job
    recipe: str
    """Recipe in text form. If it cannot be parsed, the answer is the reason."""
    gpu: Gpu
    loop: str = "plain"
    software: str = "installed"
    """Name of the software versions that the prediction assumes: `installed` or `published-2022`."""

    @property
    def key(self) -> RequestKey:
        """Return the fields that identify this request among the guide's."""
        return RequestKey(self.about, self.gpu.key, self.software)


class RequestKey(NamedTuple):
    """The fields that identify a `PredictionRequest` of the guide."""

    about: str
    gpu: str
    software: str


def predict_or_reason(request: PredictionRequest) -> Prediction | str:
    """Return the requested prediction, or the reason why it failed."""
    try:
        return predict(
            request.job,
            Recipe.parse(request.recipe),
            gpu=request.gpu,
            loop=request.loop,
            software=request.software,
        )
    except SnugfitError as refusal:
        return str(refusal)


def predict_all(
    requests: Sequence[PredictionRequest], *, workers: int, tell: Callable[[str], None] = lambda about: None
) -> list[Prediction | str]:
    """Return each requested prediction, or the reason why it failed, in the order of the requests.

    `tell` is called with the subject of each request when its prediction is finished.
    """
    families = {request.job.model.architecture for request in requests}
    preload = [f"transformers.models.{name}.modeling_{name}" for name in sorted(families)]
    last_first = requests[::-1]  # the dear ones come last in a suite; begun first, they leave no process idle
    answers = []
    predictions = map_in_processes(predict_or_reason, last_first, workers=workers, preload=preload)
    for request, answer in zip(last_first, predictions, strict=True):
        tell(request.about)
        answers.append(answer)
    return answers[::-1]
