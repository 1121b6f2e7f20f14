"""The option `--trace`, and the writing of its file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from snugfit.cli import arguments as given
from snugfit.errors import UsageError

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.results.prediction import Prediction

TraceFile = Annotated[
    Path | None,
    given.file_option(
        "--trace",
        "Write the predicted step for PyTorch's memory viewer (FILE.pickle), or as a timeline for "
        "Perfetto (FILE.json).",
        (".pickle", ".json"),
        "a trace is a .pickle for PyTorch's memory viewer, or a .json for Perfetto",
    ),
]


def _options(*, trace: TraceFile = None) -> None:
    """Declare the option `--trace` as a parameter."""


OPTIONS = tuple(inspect.signature(_options, eval_str=True).parameters.values())
"""The option `--trace` of `snugfit predict`."""


def check_trace(flags: Mapping[str, Any], gpu: Gpu | None) -> None:
    """Raise `UsageError`, before long work begins, if other options exclude a trace file."""
    path = flags.get("trace")
    if path is None:
        return
    if flags.get("compare"):
        raise UsageError("--trace writes one recipe. Leave --compare out.")
    if path.suffix == ".json" and gpu is None:
        raise UsageError("--trace FILE.json is a timeline in seconds, which need a GPU. Add --gpu NAME.")


def write_trace(flags: Mapping[str, Any], prediction: Prediction) -> None:
    """Write a prediction's step to the file that `--trace` names, if it is given."""
    path = flags.get("trace")
    if path is None:
        return
    from snugfit.features.traces.export_trace import export_trace
    from snugfit.report.text.files import write_atomically

    given.say_written(write_atomically(path, export_trace(prediction, path.suffix)))
