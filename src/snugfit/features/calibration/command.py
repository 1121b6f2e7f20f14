"""The command `snugfit calibrate`: it measures hardware rates of this GPU and its host, and stores them for
predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from snugfit.cli import arguments as given
from snugfit.errors import GpuError, SnugfitError
from snugfit.measurement.target import gpu_here

if TYPE_CHECKING:
    from snugfit.features.calibration.calibrate import ProbeReading
    from snugfit.prediction.rates import Rates
    from snugfit.report.text.table import PlainTable


Gpus = Annotated[
    int,
    typer.Option(
        help="Calibrate while so many GPUs of this host work, for predictions on so many. \\[1]", min=1
    ),
]


def calibrate(gpus: Gpus = 1, as_json: given.AsJson = False) -> None:
    """Measure power and rates of this GPU, and its host, in up to three minutes. Later predictions for
    it use them.
    """
    name = gpu_here()
    if name is None:
        raise GpuError("This machine has no GPU to calibrate. Use a machine with a GPU.")
    from snugfit.cli.progress import show_progress
    from snugfit.features.calibration.calibrate import calibrate as run
    from snugfit.frontends.own import refuse_more_than_here
    from snugfit.job.gpu import find_gpu
    from snugfit.prediction.rates import calibration_file
    from snugfit.report.text.terminal import show, show_json
    from snugfit.user_files import user_path

    if gpus > 1:
        refuse_more_than_here(gpus, "cuda")
    gpu = find_gpu(name)
    file = user_path(calibration_file(gpu, gpus))
    with show_progress(f"calibrating {gpu.name}") as tell:
        calibration = run(gpu, gpus=gpus, tell=tell)
    document = calibration.to_json()
    _write(file, document)
    if as_json:
        show_json(document)
    else:
        show(_table(calibration.rates, calibration.readings))
        if sentence := sentence_about_others(calibration.readings):
            typer.echo(sentence)
        if reason := calibration.unmeasured:
            typer.echo(f"The power of this GPU was not measured: {reason}. The other rates are complete.")
        typer.echo(f"Written: {file}")


def _write(file: Path, document: dict[str, Any]) -> None:
    """Write a GPU's calibration file atomically. Raises `SnugfitError` when it cannot be written."""
    from snugfit.documents import write_document

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_document(file, document)
    except OSError as error:
        raise SnugfitError(
            f"{file}: cannot be written ({error.strerror}). Free space there, or change its permissions."
        ) from None


def sentence_about_others(readings: Sequence[ProbeReading]) -> str:
    """Return a sentence on other processes that used the CPU during the probes. Return an empty text if none
    did.
    """
    from snugfit.results.measurement import HIGH_DISTURBANCE

    shares = [reading.disturbed or 0.0 for reading in readings if reading.probe.is_of_host]
    share = max(shares, default=0.0)
    if share <= HIGH_DISTURBANCE:
        return ""
    return (
        f"Other processes disturbed the CPU core in {100 * share:.0f} % of the checks while the host was "
        "measured. So the seconds of steps that the host bounds will be off. Calibrate again when it is "
        "quiet."
    )


def _table(rates: Rates, readings: Sequence[ProbeReading]) -> PlainTable:
    """Return a table with one row per probe: predicted and measured step time, and the factor that corrects
    its rate.
    """
    from snugfit.report.text.table import table
    from snugfit.units import show_seconds

    rows = [
        (
            reading.probe.corrects,
            reading.probe.recipe,
            show_seconds(reading.predicted_seconds),
            show_seconds(reading.measured_seconds) if reading.measured_seconds else "",
            f"{reading.factor:.2f}" if reading.factor else reading.why,
        )
        for reading in readings
    ]
    heads = ("Probe", "Recipe", "predicted>", "measured>", "factor>")
    return table(heads, rows, title=f"{rates.gpu}: seconds per step, before and after")
