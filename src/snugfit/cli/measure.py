"""The command `snugfit measure`: the figures of `predict`, measured by running the job in a new process.

Exit code 4 when the run ran out of GPU memory, 1 when it died of anything else.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snugfit.cli import arguments as given
from snugfit.cli.request import Request
from snugfit.errors import OutOfMemory, UsageError, require_packages
from snugfit.measurement.target import gpu_here, target_here
from snugfit.techniques.registry import hooks

if TYPE_CHECKING:
    from snugfit.comparison.compare import Comparison
    from snugfit.results.measurement import Measurement
    from snugfit.results.prediction import Prediction

RUN = "The run"

ON_CPU = "This machine has no GPU that torch can use: the step runs on the CPU, without a GPU's figures."
Steps = Annotated[int, given.option(RUN, "Number of steps to time, after the warm-up.", min=1)]
Warmup = Annotated[int, given.option(RUN, "Number of warm-up steps, which are not timed.", min=0)]
Device = Annotated[
    str | None, given.option(RUN, "cuda, cuda:1 or cpu. \\[a GPU if there is one, else the CPU]")
]
Deadline = Annotated[float, given.option(RUN, "Stop the run after so many seconds.", min=1.0)]
Ledger = Annotated[Path, given.option(RUN, "Folder in which measured runs are saved.")]
Predict = Annotated[
    bool, given.option(RUN, "Also predict the step, and show both side by side.", "--predict")
]


@given.about_a_job
def measure(
    request: Request,
    *,
    steps: Steps = 10,
    warmup: Warmup = 3,
    device: Device = None,
    gpus: given.Gpus = None,
    mesh: given.Mesh = None,
    deadline: Deadline = 600.0,
    ledger: Ledger = Path("snugfit-runs"),
    predict: Predict = False,
    details: given.Details = False,
    quiet: given.Quiet = False,
    as_json: given.AsJson = False,
) -> int:
    """Measure a training step here: its memory, its time, and how it ended."""
    from snugfit.measurement.host import spill_to_host
    from snugfit.measurement.measure import PACKAGES
    from snugfit.measurement.measure import measure as run
    from snugfit.prediction.device import policy_for
    from snugfit.prediction.profile import Software

    # Without NVML's package, this machine would seem to have no GPU.
    require_packages("snugfit measure", *PACKAGES)
    # Raises the error for a GPU that cannot be predicted; the result is not needed.
    policy_for(request.gpu, Software())
    if target_here(device).type == "cpu" and device is None:
        typer.echo(ON_CPU, err=True)
    elif device != "cpu" and (spills := spill_to_host()):
        typer.echo(f"Note: {spills}.", err=True)
    request = request.with_least(lambda: gpu_here(device))
    # The prediction comes first, so that its errors appear before a run of minutes.
    count = request.gpus if gpus is None else gpus
    predicted = _predict(request, device, count) if predict else None
    typer.echo(
        f"snugfit: measuring {warmup + steps} {request.job.words.turns}, for at most {deadline:g} s ...",
        err=True,
    )
    measured = run(
        request.job,
        request.recipe,
        loop=request.loop,
        device=device,
        gpus=count,
        warmup=warmup,
        steps=steps,
        deadline_seconds=deadline,
        ledger=ledger,
    )
    from snugfit.comparison.compare import compare

    comparison = compare(predicted, measured) if predicted and measured.footprint else None
    _print(measured, predicted, comparison, details=details, quiet=quiet, as_json=as_json)
    given.hand_over(request.flags, comparison if comparison and comparison.lines else measured)
    if measured.ok:
        return 0
    for changes in hooks("changes_that_fit"):
        changes().show_after_measurement(measured, request, gpu_here(device))
    return OutOfMemory.exit_code if measured.outcome.startswith("oom") else 1


def _predict(request: Request, device: str | None, gpus: int) -> Prediction:
    """Return the prediction for the command's GPU, or else for the GPU that will be measured, with the same
    number of GPUs.
    """
    from snugfit.job.gpu import find_gpu
    from snugfit.prediction.predict import predict

    gpu = request.gpu
    if gpu is None:
        name = gpu_here(device)
        if name is None:
            raise UsageError("--predict: the measurement runs on the CPU. Add --gpu NAME for the prediction.")
        gpu = find_gpu(name)
    return predict(request.job, request.recipe, gpu=gpu, gpus=gpus, loop=request.loop)


def _print(
    measured: Measurement,
    predicted: Prediction | None,
    comparison: Comparison | None,
    *,
    details: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    from snugfit.report import measurement, prediction, short
    from snugfit.report.compare import beside
    from snugfit.report.text.terminal import show, show_json

    if as_json:
        show_json(comparison.to_json() if comparison else measured.to_json())
        return
    page = measurement.short(measured)
    if quiet:
        print(page.first_line)
        return
    show(measurement.render(measured) if details else page)
    if measured.ok and comparison and comparison.lines:
        show(beside(comparison))
    elif predicted:  # without GPU figures (a run on the CPU, or a failed one), nothing is compared
        show(prediction.render(predicted) if details else short.render(predicted))
