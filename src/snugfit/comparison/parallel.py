"""Many predictions at once, in as many processes as there are cores to give.

A rehearsal is Python on one core, and the guide's suite is some forty of them. Each request is plain data,
and so is its answer; one that cannot be answered is answered with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    """One prediction of a suite."""

    about: str
    """What it is for, in words."""

    job: Job
    """What must be trained."""

    recipe: str
    """How, as text: a recipe that cannot be read is an answer too."""

    gpu: Gpu
    """On what."""

    loop: str = "plain"
    """By which loop."""

    software: str = "installed"
    """Under which software."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from the suite's other questions."""
        return self.about, self.gpu.key, self.software


def predict_or_reason(request: PredictionRequest) -> Prediction | str:
    """The prediction, or why there is none."""
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
    """The prediction of each request, or why there is none, in their order; `tell` hears what each is about
    when its turn comes."""
    answers = []
    predictions = map_in_processes(predict_or_reason, requests, workers=workers)
    for request, answer in zip(requests, predictions, strict=True):
        tell(request.about)
        answers.append(answer)
    return answers
