"""Prediction and measurement of every experiment of the Hugging Face performance guide.

The results are compared with the figures that the guide publishes.

`run` computes up to three results for each experiment. The first is its prediction on the given GPU, under
the installed software. The second is its measurement here. The third is a prediction for each published
figure whose GPU is known, with the package versions of the time. An experiment without a prediction (because
of a missing package, for example) keeps its row, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from snugfit.errors import SnugfitError
from snugfit.features.guide.per_parameter import per_parameter, per_parameter_requests
from snugfit.features.guide.predictions import PredictionRequest, RequestKey, predict_all
from snugfit.features.guide.result import GuideResult, GuideRow, PublishedPrediction
from snugfit.features.guide.suite import GuideExperiment, Published, machines, suite, without_figures
from snugfit.job.gpu import find_gpu
from snugfit.prediction.device import policy_for
from snugfit.prediction.profile import Software
from snugfit.techniques.recipe import Recipe

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.results.prediction import Prediction

Answers = dict[RequestKey, "Prediction | str"]
"""The type of the results by request: a prediction, or the reason why there is none."""


def run(
    gpu: Gpu,
    *,
    measure: bool = False,
    optimizers: bool = False,
    ledger: Path | None = None,
    workers: int = 1,
    tell: Callable[[str], None] = lambda line: None,
) -> GuideResult:
    """Predict all experiments of the guide for `gpu`, and return the results.

    With `measure` each experiment also runs on this machine, in a separate process. With `optimizers` the
    result includes the bytes per parameter with each optimizer. `workers` processes predict in parallel.
    `tell` is called with a line about the current work. Raises `SnugfitError` when no experiment can be
    predicted, `GpuError` for a GPU that supports no experiment.
    """
    policy_for(gpu, Software())  # raises an error for a GPU that no step runs on
    experiments = suite()
    requests = [request for experiment in experiments for request in _requests(experiment, gpu)]
    byte_requests = per_parameter_requests(gpu) if optimizers else []
    predictions = predict_all([*requests, *byte_requests], workers=workers, tell=tell)
    # The suite's requests come first, so `zip` ends with them.
    answers: Answers = {
        request.key: prediction for request, prediction in zip(requests, predictions, strict=False)
    }
    rows = [_row(experiment, gpu, answers) for experiment in experiments]
    if all(row.predicted is None for row in rows):
        raise SnugfitError(f"No experiment of the guide could be predicted. The first: {rows[0].refused}")
    device = None
    if measure:
        rows, device = _measure_all(rows, experiments, ledger, tell)
    doubts = [
        doubt
        for request in requests
        if request.gpu == gpu and not isinstance(prediction := answers[request.key], str)
        for doubt in prediction.doubts
    ]
    return GuideResult(
        gpu=gpu.name,
        memory_bytes=gpu.memory_bytes,
        rows=tuple(rows),
        per_parameter=per_parameter(byte_requests, predictions[len(requests) :]),
        without_figures=without_figures(),
        device=device,
        versions=dict(next(answer.versions for answer in predictions if not isinstance(answer, str))),
        doubts=tuple(dict.fromkeys(doubts)),
    )


def _requests(experiment: GuideExperiment, gpu: Gpu) -> Iterator[PredictionRequest]:
    """Yield the predictions to make for an experiment: one for the given GPU, and one for each published
    result's machine.
    """
    yield _request(experiment, gpu)
    for published in experiment.published:
        request = _request_then(experiment, published)
        if request is not None:
            yield request


def _request(experiment: GuideExperiment, gpu: Gpu, software: str = "installed") -> PredictionRequest:
    return PredictionRequest(
        about=experiment.name,
        job=experiment.job(),
        recipe=experiment.recipe,
        gpu=gpu,
        loop=experiment.loop,
        software=software,
    )


def _request_then(experiment: GuideExperiment, published: Published) -> PredictionRequest | None:
    """Return the prediction to make for a published result, with its GPU and the package versions of its
    time. Return None if the GPU is unknown.
    """
    machine = machines()[published.machine]
    if machine.gpu is None or machine.software is None:
        return None
    return _request(experiment, find_gpu(machine.gpu), machine.software)


def _row(experiment: GuideExperiment, gpu: Gpu, answers: Answers) -> GuideRow:
    row = GuideRow(
        name=experiment.name,
        recipe=experiment.recipe,
        loop=experiment.loop,
        then=tuple(_then(experiment, published, answers) for published in experiment.published),
    )
    answer = answers[_request(experiment, gpu).key]
    if isinstance(answer, str):
        return replace(row, refused=answer)
    return replace(row, predicted=answer.footprint, fits=answer.fits, predicted_speed=answer.speed)


def _then(experiment: GuideExperiment, published: Published, answers: Answers) -> PublishedPrediction:
    request = _request_then(experiment, published)
    answer = answers[request.key] if request else ""
    if isinstance(answer, str):
        return PublishedPrediction(published=published)
    return PublishedPrediction(
        published=published, predicted_bytes=answer.footprint.nvml_bytes, predicted_speed=answer.speed
    )


def _measure_all(
    rows: list[GuideRow],
    experiments: tuple[GuideExperiment, ...],
    ledger: Path | None,
    tell: Callable[[str], None],
) -> tuple[list[GuideRow], str | None]:
    """Measure the experiments that could be predicted on this machine. Return all rows, and the name of the
    GPU.
    """
    from snugfit.measurement.measure import measure

    measured_rows, device = [], None
    for row, experiment in zip(rows, experiments, strict=True):
        if row.refused:
            measured_rows.append(row)
            continue
        tell(f"measuring {experiment.name}")
        run = measure(experiment.job(), Recipe.parse(row.recipe), loop=row.loop, ledger=ledger)
        device = run.device.name
        measured_rows.append(replace(row, measured=run.footprint, timing=run.timing, outcome=run.outcome))
    return measured_rows, device
