"""`snugfit calibrate`: what this GPU and its host achieve, remembered for predictions."""

from __future__ import annotations

import typer

from snugfit.cli import arguments as given
from snugfit.cli.here import gpu_here
from snugfit.errors import GpuError, SnugfitError


def calibrate(as_json: given.AsJson = False) -> None:
    """Measure this GPU and its host in about a minute; predictions for it use what was found."""
    here = gpu_here()
    if here is None:
        raise GpuError("There is no GPU here to calibrate.")
    from snugfit.cli.progress import telling
    from snugfit.comparison.calibrate import calibrate as run
    from snugfit.documents import write_document
    from snugfit.job.gpu import find_gpu
    from snugfit.prediction.rates import calibration_file
    from snugfit.report.evaluation.calibration import render
    from snugfit.report.text.terminal import show, show_json
    from snugfit.versions import versions

    gpu = find_gpu(here)
    with telling() as tell:
        rates, readings = run(gpu, tell=tell)
    document = {
        "schema": 1,
        "what": "calibration",
        "rates": rates.to_json(),
        "readings": [reading.to_json() for reading in readings],
        "versions": versions(),
    }
    file = calibration_file(gpu)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_document(file, document)
    except OSError as error:
        raise SnugfitError(f"{file}: cannot be written ({error.strerror}).") from None
    if as_json:
        show_json(document)
    else:
        show(render(rates, readings))
        typer.echo(f"Written: {file}")
