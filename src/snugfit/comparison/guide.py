"""The guide's suite, run: every experiment predicted, measured where there is a GPU, and as published.

`run` asks three questions of each experiment: what it would take on the GPU that was named, under the
software that is installed; what it takes here, when it is measured; and, for each published figure whose
machine names its GPU, what it would have taken there under the software of the time. An experiment that
cannot be asked (a technique that this GPU cannot do, a package that is missing) keeps its row and says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from snugfit.comparison.per_parameter import per_parameter
from snugfit.comparison.result import GuideResult, Row, Then
from snugfit.comparison.suite import Experiment, machines, suite
from snugfit.errors import SnugfitError
from snugfit.job.gpu import find_gpu
from snugfit.prediction.predict import predict
from snugfit.techniques.recipe import Recipe

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.prediction.prediction import Prediction


def run(
    gpu: Gpu,
    *,
    measure: bool = False,
    ledger: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> GuideResult:
    """The whole suite for `gpu`; with `measure` each experiment also runs here, in a process of its own.

    `tell` hears the name of each experiment as it begins. Raises `SnugfitError` when none can be predicted.
    """
    rows, foreseen = [], []
    device = None
    for experiment in suite():
        tell(experiment.name)
        row, prediction = _predicted(experiment, gpu)
        foreseen += [prediction] if prediction else []
        row = replace(row, then=_then(experiment))
        if measure and not row.refused:
            row, device = _measured(row, experiment, ledger)
        rows.append(row)
    if not foreseen:
        raise SnugfitError(f"No experiment of the guide could be predicted. The first: {rows[0].refused}")
    tell("bytes per parameter")
    return GuideResult(
        gpu=gpu.name,
        memory_bytes=foreseen[0].memory_bytes,
        rows=tuple(rows),
        per_parameter=per_parameter(gpu),
        device=device,
        versions=dict(foreseen[0].versions),
        doubts=tuple(dict.fromkeys(doubt for prediction in foreseen for doubt in prediction.doubts)),
    )


def _predicted(experiment: Experiment, gpu: Gpu) -> tuple[Row, Prediction | None]:
    row = Row(name=experiment.name, recipe=experiment.recipe, loop=experiment.loop)
    try:
        prediction = predict(experiment.job(), Recipe.parse(experiment.recipe), gpu=gpu, loop=experiment.loop)
    except SnugfitError as refusal:
        return replace(row, refused=str(refusal)), None
    return replace(row, predicted=prediction.footprint, fits=prediction.fits), prediction


def _then(experiment: Experiment) -> tuple[Then, ...]:
    """Every published figure of an experiment, predicted where its machine names a GPU."""
    known = machines()
    found = []
    for published in experiment.published:
        machine = known[published.machine]
        if machine.gpu is None or machine.software is None:
            found.append(Then(published=published))
            continue
        prediction = predict(
            experiment.job(),
            Recipe.parse(experiment.recipe),
            gpu=find_gpu(machine.gpu),
            loop=experiment.loop,
            software=machine.software,
        )
        found.append(Then(published=published, predicted_bytes=prediction.footprint.nvml_bytes))
    return tuple(found)


def _measured(row: Row, experiment: Experiment, ledger: Path | None) -> tuple[Row, str]:
    from snugfit.measurement.measure import measure

    seen = measure(experiment.job(), Recipe.parse(experiment.recipe), loop=experiment.loop, ledger=ledger)
    return replace(row, measured=seen.footprint, timing=seen.timing, outcome=seen.outcome), seen.device.name
