"""`snugfit accuracy`: jobs that nobody chose, predicted and measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from snugfit.cli import arguments as given
from snugfit.cli.here import gpu_here
from snugfit.errors import GpuError, OutsideBand, UsageError

if TYPE_CHECKING:
    from snugfit.comparison.runs import Accuracy

Draw = Annotated[int, typer.Option("--draw", help="How many jobs and recipes.", min=1, max=1000)]
Seed = Annotated[int, typer.Option(help="What they are drawn from.", min=0)]
Output = Annotated[Path, typer.Option(help="Folder for the result.", file_okay=False)]
PredictOnly = Annotated[bool, typer.Option("--predict-only", help="Draw and predict; measure nothing.")]
Workers = Annotated[
    int | None, typer.Option(help="Processes that predict side by side. [4, or one a core]", min=1)
]
Show = Annotated[
    Path | None, typer.Option(help="Show the results in this file or folder; draw nothing.", metavar="PATH")
]
Format = Annotated[Literal["terminal", "markdown", "json"], typer.Option("--format", help="What to print.")]

USUAL_WORKERS = 4
"""The GPU is waited for; more predictions at once would only crowd the host while steps are timed."""


def accuracy(
    *,
    draw: Draw = 16,
    seed: Seed = 0,
    gpu: given.GpuName = None,
    output: Output = Path("snugfit-accuracy"),
    predict_only: PredictOnly = False,
    workers: Workers = None,
    show: Show = None,
    form: Format = "terminal",
    as_json: given.AsJson = False,
) -> None:
    """Draw jobs and recipes, predict and measure each, and show the errors."""
    form = "json" if as_json else form
    if show is not None:
        _print(_read(show), form)
        return
    from snugfit.cli.progress import telling
    from snugfit.comparison.accuracy import accuracy as run
    from snugfit.job.gpu import find_gpu
    from snugfit.report.accuracy import file_name
    from snugfit.report.files import writable_folder

    here = gpu_here()
    if here is None and not predict_only:
        raise GpuError("There is no GPU here to measure on. Try --predict-only --gpu NAME.")
    if gpu is None and here is None:
        raise GpuError("No GPU to predict for: add --gpu NAME. `snugfit gpus` lists them.")
    wanted = find_gpu(gpu or here or "")
    file = writable_folder(output) / file_name(seed)
    with telling() as tell:
        result = run(
            seed,
            draw,
            wanted,
            file=file,
            measured=not predict_only,
            workers=workers or min(USUAL_WORKERS, os.cpu_count() or 1),
            tell=tell,
        )
    _print([result], form)
    typer.echo(f"Written: {file}", err=form != "terminal")
    if result.outside:
        raise OutsideBand(f"{len(result.outside)} of {len(result.runs)} runs are outside the band.")


def _print(results: list[Accuracy], form: str) -> None:
    from snugfit.report import accuracy as report
    from snugfit.report.terminal import show, show_json

    if form == "markdown":
        typer.echo(report.document(results), nl=False)
    elif form == "json":
        for result in results:
            show_json(result.to_json())
    else:
        for result in results:
            show(report.render(result))


def _read(path: Path) -> list[Accuracy]:
    """The results in a file, or in a folder's `accuracy-seed*.json`."""
    from snugfit.comparison.kept import read

    files = sorted(path.glob("accuracy-seed*.json")) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"--show {path}: no accuracy-seed*.json there.")
    return [read(file) for file in files]
