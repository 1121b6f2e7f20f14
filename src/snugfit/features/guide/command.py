"""`snugfit guide`: the guide's experiments, predicted and measured, as tables, files and one plot."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from snugfit.cli import arguments as given
from snugfit.measurement.target import gpu_here

if TYPE_CHECKING:
    from snugfit.features.guide.result import GuideResult
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.report.page.chart import PageParts

GpuName = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Predict for this GPU. \\[this machine's, or the guide's]"),
]
Measure = Annotated[bool, typer.Option("--measure", help="Also run every experiment on this machine.")]
Output = Annotated[
    Path, typer.Option(help="Write the tables and the plot into this folder.", file_okay=False)
]
Workers = Annotated[
    int | None, typer.Option(help="Number of processes that predict in parallel. \\[one per core]", min=1)
]
Modern = Annotated[
    bool,
    typer.Option(
        "--modern", help="Also plan each experiment's job: the fastest recipe of today in the same memory."
    ),
]
Optimizers = Annotated[
    bool,
    typer.Option(
        "--optimizers", help="Also predict the bytes per parameter of every optimizer: a minute or two more."
    ),
]
Format = Annotated[
    Literal["terminal", "markdown", "csv", "json"], typer.Option("--format", help="What to print.")
]


def guide(
    *,
    gpu: GpuName = None,
    measure: Measure = False,
    modern: Modern = False,
    optimizers: Optimizers = False,
    output: Output = Path("snugfit-guide"),
    workers: Workers = None,
    html: given.Html = None,
    open: given.Open = False,
    plot: given.Plot = None,
    form: Format = "terminal",
    as_json: given.AsJson = False,
) -> None:
    """Predict (and measure) the experiments of the Hugging Face single-GPU guide."""
    from snugfit.cli.progress import show_progress
    from snugfit.errors import GpuError
    from snugfit.features.guide.plot import page_parts
    from snugfit.features.guide.suite import own_gpu
    from snugfit.job.gpu import find_gpu
    from snugfit.report.text.files import writable_folder

    given.check_pictures(html, plot)
    form = "json" if as_json else form
    # A measurement is for this machine's GPU, also if another one is named.
    name = None if gpu and not measure else gpu_here()
    if measure and name is None:
        raise GpuError(
            "--measure: this machine has no GPU to run the experiments on. Leave it out to predict only."
        )
    target = find_gpu(gpu or name or own_gpu())
    folder = writable_folder(output)

    workers = workers or os.cpu_count() or 1
    with show_progress("measuring the guide" if measure else "predicting the guide") as tell:
        from snugfit.features.guide.run import run

        result = run(
            target,
            measure=measure,
            optimizers=optimizers,
            ledger=folder / "runs",
            workers=workers,
            tell=tell,
        )
    if modern:
        result = _with_modern(result, target, workers)
    parts = page_parts(result)
    paths = write(result, parts, folder)
    given.write_pictures(html, plot, parts, open_page=open)
    _print(result, form)
    typer.echo("\n".join(f"Written: {path}" for path in paths), err=form != "terminal")


def write(result: GuideResult, parts: PageParts, folder: Path) -> list[Path]:
    """Write guide.md, guide.csv, guide.json, guide.png and guide.svg into `folder`; return their paths."""
    from snugfit.features.guide.tables import csv, markdown
    from snugfit.report.pictures import plot_bytes
    from snugfit.report.text.files import write_atomically

    contents: dict[str, bytes] = {
        "guide.png": plot_bytes(parts, "png"),
        "guide.svg": plot_bytes(parts, "svg"),
        "guide.md": markdown(result, plot="guide.png").encode(),
        "guide.csv": csv(result).encode(),
        "guide.json": json.dumps(result.to_json(), indent=2, allow_nan=False).encode() + b"\n",
    }
    return [write_atomically(folder / name, content) for name, content in contents.items()]


def _with_modern(result: GuideResult, gpu: Gpu, workers: int) -> GuideResult:
    """Return the result with the best recipe of today for each experiment. Plans are cached, as in `snugfit
    plan`."""
    from snugfit.cli.plan_cache import plan
    from snugfit.cli.progress import show_progress
    from snugfit.features.guide.modern import FrontRecipe, PlannedJob, with_large_models, with_modern
    from snugfit.techniques import roster
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.technique import Slot

    def plan_of(job: Job) -> PlannedJob:
        unchanged = " + ".join(str(roster.plain(slot)) for slot in (Slot.KERNELS, Slot.ENGINE))
        planned = plan(job, gpu=gpu, keep=unchanged)
        front = (
            FrontRecipe(
                recipe=Recipe.parse(choice.recipe),
                needed_bytes=choice.needed_bytes,
                speed=planned.timed(choice),
            )
            for choice in planned.front
        )
        return PlannedJob(front=tuple(front), doubts=planned.doubts)

    result = with_modern(result, plan_of)
    with show_progress() as tell:
        return with_large_models(result, workers=workers, tell=tell)


def _print(result: GuideResult, form: str) -> None:
    from snugfit.features.guide.tables import csv, markdown, render
    from snugfit.report.text.page import print_as

    if form in ("csv", "markdown"):
        typer.echo(csv(result) if form == "csv" else markdown(result, plot="guide.png"), nl=False)
    else:
        print_as(form, result.to_json(), render(result))
