"""Create the file of the option `--trace`: a predicted step for PyTorch's memory viewer, or for Perfetto."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING

from snugfit.errors import UsageError
from snugfit.prediction.exchanges import exchanges
from snugfit.prediction.predict import rehearse_again
from snugfit.prediction.rates import rates_for
from snugfit.prediction.timeline import time_kernels
from snugfit.prediction.traces.chrome_trace import chrome_trace
from snugfit.prediction.traces.memory_snapshot import memory_snapshot

if TYPE_CHECKING:
    from snugfit.results.prediction import Prediction

SNAPSHOT, CHROME = ".pickle", ".json"


def export_trace(prediction: Prediction, form: str) -> bytes:
    """Simulate a prediction's step again, and return its trace as a file with the ending `form`.

    `form` is `.pickle` (memory snapshot) or `.json` (timeline). Raises `UsageError` for a timeline without a
    GPU, `GpuError` where the GPU's rates are unknown.
    """
    if form == CHROME and prediction.gpu is None:
        raise UsageError("--trace FILE.json is a timeline in seconds, which need a GPU. Add --gpu NAME.")
    trace, setup = rehearse_again(prediction), prediction.recipe.setup()
    if form == SNAPSHOT:
        return pickle.dumps(memory_snapshot(trace, expandable=setup.expandable_segments))
    assert prediction.gpu is not None
    rates = rates_for(prediction.gpu, prediction.gpus)
    timed = time_kernels(
        trace,
        rates,
        exchanges().link(prediction.gpu, rates),
        workers=setup.loader.workers,
    )
    return json.dumps(chrome_trace(trace, timed), allow_nan=False, separators=(",", ":")).encode()
