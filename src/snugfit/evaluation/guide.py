"""The guide's suite, run: every experiment predicted, measured where there is a GPU, and as published.

`run` asks three questions of each experiment: what it would take on the GPU that was named, under the
software that is installed; what it takes here, when it is measured; and, for each published figure whose
machine names its GPU, what it would have taken there under the software of the time. An experiment that
cannot be asked (a technique that this GPU cannot do, a package that is missing) keeps its row and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from snugfit.comparison.parallel import PredictionRequest, predict_all
from snugfit.errors import SnugfitError
from snugfit.evaluation.guide_result import GuideResult, GuideRow, PublishedPrediction
from snugfit.evaluation.guide_suite import GuideExperiment, Published, machines, suite
from snugfit.evaluation.per_parameter import per_parameter
from snugfit.evaluation.per_parameter import questions as anatomy_questions
from snugfit.job.gpu import find_gpu
from snugfit.techniques.recipe import Recipe

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.results.prediction import Prediction

Answers = dict[tuple[str, str, str], "Prediction | str"]
"""By the questions' keys."""


def run(
    gpu: Gpu,
    *,
    measure: bool = False,
    ledger: Path | None = None,
    workers: int = 1,
    tell: Callable[[str], None] = lambda line: None,
) -> GuideResult:
    """The whole suite for `gpu`; with `measure` each experiment also runs here, in a process of its own.

    `workers` processes predict side by side. `tell` hears what is being done. Raises `SnugfitError` when no
    experiment can be predicted.
    """
    experiments = suite()
    asked = [question for experiment in experiments for question in _questions(experiment, gpu)]
    about_bytes = anatomy_questions(gpu)
    given = predict_all([*asked, *about_bytes], workers=workers, tell=tell)
    known = {question.key: one for question, one in zip(asked, given, strict=False)}
    rows = [_row(experiment, gpu, known) for experiment in experiments]
    foreseen = [one for one in given if not isinstance(one, str)]
    if all(row.predicted is None for row in rows):
        raise SnugfitError(f"No experiment of the guide could be predicted. The first: {rows[0].refused}")
    device = None
    if measure:
        rows, device = _measure_all(rows, experiments, ledger, tell)
    doubts = [doubt for question in asked if question.gpu == gpu for doubt in _doubts(known[question.key])]
    return GuideResult(
        gpu=gpu.name,
        memory_bytes=gpu.memory_bytes,
        rows=tuple(rows),
        per_parameter=per_parameter(about_bytes, given[len(asked) :]),
        device=device,
        versions=dict(foreseen[0].versions),
        doubts=tuple(dict.fromkeys(doubts)),
    )


def _questions(experiment: GuideExperiment, gpu: Gpu) -> Iterator[PredictionRequest]:
    """On the GPU that was named, and on each machine that published a result and names its GPU."""
    yield _question(experiment, gpu)
    for published in experiment.published:
        then = _question_then(experiment, published)
        if then is not None:
            yield then


def _question(experiment: GuideExperiment, gpu: Gpu, software: str = "installed") -> PredictionRequest:
    return PredictionRequest(
        about=experiment.name,
        job=experiment.job(),
        recipe=experiment.recipe,
        gpu=gpu,
        loop=experiment.loop,
        software=software,
    )


def _question_then(experiment: GuideExperiment, published: Published) -> PredictionRequest | None:
    machine = machines()[published.machine]
    if machine.gpu is None or machine.software is None:
        return None
    return _question(experiment, find_gpu(machine.gpu), machine.software)


def _row(experiment: GuideExperiment, gpu: Gpu, known: Answers) -> GuideRow:
    row = GuideRow(
        name=experiment.name,
        recipe=experiment.recipe,
        loop=experiment.loop,
        then=tuple(_then(experiment, published, known) for published in experiment.published),
    )
    given = known[_question(experiment, gpu).key]
    if isinstance(given, str):
        return replace(row, refused=given)
    return replace(row, predicted=given.footprint, fits=given.fits)


def _then(experiment: GuideExperiment, published: Published, known: Answers) -> PublishedPrediction:
    question = _question_then(experiment, published)
    given = known[question.key] if question else ""
    return PublishedPrediction(
        published=published,
        predicted_bytes=None if isinstance(given, str) else given.footprint.nvml_bytes,
    )


def _doubts(given: Prediction | str) -> tuple[str, ...]:
    return () if isinstance(given, str) else given.doubts


def _measure_all(
    rows: list[GuideRow],
    experiments: tuple[GuideExperiment, ...],
    ledger: Path | None,
    tell: Callable[[str], None],
) -> tuple[list[GuideRow], str | None]:
    """Every row that could be predicted, measured here; and on what."""
    from snugfit.measurement.measure import measure

    measured, device = [], None
    for row, experiment in zip(rows, experiments, strict=True):
        if row.refused:
            measured.append(row)
            continue
        tell(f"measuring {experiment.name}")
        seen = measure(experiment.job(), Recipe.parse(row.recipe), loop=row.loop, ledger=ledger)
        device = seen.device.name
        measured.append(replace(row, measured=seen.footprint, timing=seen.timing, outcome=seen.outcome))
    return measured, device
