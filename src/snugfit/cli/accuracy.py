"""`snugfit accuracy`: jobs that nobody chose, predicted and measured; and what becomes of such results later.

It draws (each run a job of its own, or several recipes of each job, or each job's best recipes by its plan),
goes on with a draw that was only predicted or was interrupted, predicts one again with today's code, or shows
what there is. What does not go together is said before anything begins.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from snugfit.cli import arguments as given
from snugfit.cli.here import gpu_here
from snugfit.errors import GpuError, OutsideBand, UsageError

if TYPE_CHECKING:
    from snugfit.comparison.compared_runs import Accuracy
    from snugfit.job.gpu import Gpu

ORDER, LATER = "The order of recipes", "What was drawn before"

Draw = Annotated[int, typer.Option("--draw", help="How many jobs.", min=1, max=1000)]
Seed = Annotated[int, typer.Option(help="What they are drawn from.", min=0)]
WithinJob = Annotated[
    int | None,
    typer.Option(metavar="R", help="Draw R recipes of each job.", min=2, max=64, rich_help_panel=ORDER),
]
Top = Annotated[
    int | None,
    typer.Option(metavar="K", help="The best K recipes of each job's plan.", min=2, max=64,
                 rich_help_panel=ORDER),
]  # fmt: skip
Jobs = Annotated[
    list[Path] | None,
    typer.Option("--job", help="A job file in place of a drawn job; repeatable.", rich_help_panel=ORDER),
]
Output = Annotated[Path, typer.Option(help="Folder for the result.", file_okay=False)]
PredictOnly = Annotated[bool, typer.Option("--predict-only", help="Draw and predict; measure nothing.")]
Workers = Annotated[
    int | None, typer.Option(help="Processes that predict in parallel. [4, or one a core]", min=1)
]
Measure = Annotated[
    Path | None,
    typer.Option(help="Measure here what this file only predicts, and write it there.", metavar="FILE",
                 rich_help_panel=LATER),
]  # fmt: skip
Rescore = Annotated[
    Path | None,
    typer.Option(help="Predict this file's runs again; what was measured stands.", metavar="FILE",
                 rich_help_panel=LATER),
]  # fmt: skip
RatesFile = Annotated[
    Path | None,
    typer.Option("--rates", help="With --rescore: a calibration to take the rates from.", metavar="FILE",
                 rich_help_panel=LATER),
]  # fmt: skip
Show = Annotated[
    Path | None,
    typer.Option(help="Show the results in this file or folder; draw nothing.", metavar="PATH",
                 rich_help_panel=LATER),
]  # fmt: skip
Plot = Annotated[
    Path | None, typer.Option(help="Draw the errors of seconds into this .png or .svg.", dir_okay=False)
]

DRAWS, OUTPUT = 16, Path("snugfit-accuracy")
USUAL_WORKERS = 4
"""The GPU is waited for; more predictions at once would only crowd the host while steps are timed."""


def accuracy(
    *,
    draw: Draw = DRAWS,
    seed: Seed = 0,
    gpu: given.GpuName = None,
    within_job: WithinJob = None,
    top: Top = None,
    job: Jobs = None,
    output: Output = OUTPUT,
    predict_only: PredictOnly = False,
    workers: Workers = None,
    measure: Measure = None,
    rescore: Rescore = None,
    rates: RatesFile = None,
    show: Show = None,
    plot: Plot = None,
    form: given.Format = "terminal",
    as_json: given.AsJson = False,
) -> None:
    """Draw jobs and recipes, predict and measure each, and show the errors."""
    form = "json" if as_json else form
    ways = {"within-job": within_job, "top": top, "measure": measure, "rescore": rescore, "show": show}
    about_a_draw = {
        "draw": draw != DRAWS, "seed": seed != 0, "gpu": gpu is not None, "predict-only": predict_only,
        "output": output != OUTPUT, "workers": workers is not None,
    }  # fmt: skip
    _refuse([way for way, value in ways.items() if value is not None], rates, job, plot)
    _refuse_idle({way for way, value in ways.items() if value is not None}, about_a_draw)
    if job and draw != DRAWS:
        raise UsageError(f"--draw {draw}: the jobs are those of --job. Leave it out.")
    if show is not None:
        _answer(_read(show), form, plot)
        return
    workers = workers or min(USUAL_WORKERS, os.cpu_count() or 1)
    if measure is not None:
        result, file = _measured(measure)
    elif rescore is not None:
        result, file = _rescored(rescore, rates, output, workers)
    else:
        wanted = _gpu(gpu, predict_only)
        result, file = _drawn(
            wanted, output, workers, draw, seed, within_job, top, job or [], not predict_only
        )
    _answer([result], form, plot)
    typer.echo(f"Written: {file}", err=form != "terminal")
    if result.outside:
        raise OutsideBand(f"{len(result.outside)} of {len(result.runs)} runs are outside the band.")


def _refuse(ways: list[str], rates: Path | None, jobs: list[Path] | None, plot: Path | None) -> None:
    """What does not go together."""
    if len(ways) > 1:
        shown = " and ".join(f"--{way}" for way in ways)
        raise UsageError(f"{shown} exclude each other. Give one of them.")
    if rates is not None and ways != ["rescore"]:
        raise UsageError("--rates goes with --rescore; a draw takes this GPU's own (snugfit calibrate).")
    if jobs and ways not in (["within-job"], ["top"]):
        raise UsageError("--job names what would be drawn; it goes with --within-job or --top.")
    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise UsageError(f"--plot {plot}: a plot is a .png or a .svg file.")
    if plot is not None:
        from snugfit.report.text.files import writable_folder

        writable_folder(plot.parent)


def _refuse_idle(ways: set[str], asked: Mapping[str, bool]) -> None:
    """What says how to draw, where nothing is drawn."""
    for way in ways & {"show", "measure", "rescore"}:
        heard = ("output", "workers") if way == "rescore" else ()
        for option, said in asked.items():
            if said and option not in heard:
                raise UsageError(f"--{option} says how to draw, and --{way} draws nothing. Leave it out.")


def _gpu(name: str | None, predict_only: bool) -> Gpu:
    """The GPU to predict for; measuring needs one here."""
    from snugfit.job.gpu import find_gpu

    here = gpu_here()
    if here is None and not predict_only:
        raise GpuError("There is no GPU here to measure on. Try --predict-only --gpu NAME.")
    if name is None and here is None:
        raise GpuError("No GPU to predict for: add --gpu NAME. `snugfit gpus` lists them.")
    return find_gpu(name or here or "")


def _drawn(
    gpu: Gpu,
    output: Path,
    workers: int,
    count: int,
    seed: int,
    recipes: int | None,
    top: int | None,
    files: list[Path],
    measured: bool,
) -> tuple[Accuracy, Path]:
    """A new draw, of whichever kind was asked for."""
    from snugfit.cli.progress import telling
    from snugfit.evaluation import accuracy as room
    from snugfit.report.evaluation.accuracy import file_name
    from snugfit.report.text.files import writable_folder

    named = [_job(file) for file in files]
    kind = "within-job" if recipes else "top" if top else "drawn"
    called = "-".join(file.stem for file in files)[:80] or f"seed{seed}"
    file = writable_folder(output) / file_name(called, kind, top or 0)
    with telling() as tell:
        how: Any = {"file": file, "measured": measured, "tell": tell}
        if recipes:
            jobs = named or count
            return room.within_jobs(seed, jobs, recipes, gpu, workers=workers, **how), file
        if top:
            jobs = named or room.drawn_jobs(seed, count)
            ranked = _ranked(gpu, top, workers, tell)
            return room.best_of(jobs, top, ranked, gpu, seed=None if named else seed, **how), file
        return room.accuracy(seed, count, gpu, workers=workers, **how), file


def _ranked(gpu: Gpu, count: int, workers: int, tell: Callable[[str], None]) -> Any:
    """A job's best recipes by its plan."""
    from snugfit.cli.verify import foreseen
    from snugfit.planning.search.search import plan

    def ranked(job: Any) -> list[Any]:
        found = plan(job, gpu=gpu, ranked=count, workers=workers, tell=tell)
        return [foreseen(choice) for choice in found.ranked]

    return ranked


def _job(file: Path) -> Any:
    """The job in a job file."""
    from snugfit.cli.request import Request
    from snugfit.techniques.recipe import Recipe

    request = Request.read({"job_file": file})
    if request.recipe != Recipe():
        raise UsageError(f"{file}: it names a recipe, and here recipes are drawn or planned. Leave it out.")
    return request.job


def _measured(file: Path) -> tuple[Accuracy, Path]:
    """What a file only predicts, measured here."""
    from snugfit.cli.progress import telling
    from snugfit.evaluation.accuracy import measure_rest
    from snugfit.evaluation.accuracy_files import read
    from snugfit.job.gpu import find_gpu

    result, here = read(file), gpu_here()
    if here is None:
        raise GpuError("There is no GPU here to measure on.")
    if find_gpu(here).key != find_gpu(result.gpu).key:
        raise GpuError(f"{file} predicts for {result.gpu}, and the GPU here is {here}.")
    with telling() as tell:
        return measure_rest(result, file=file, tell=tell), file


def _rescored(source: Path, rates_file: Path | None, output: Path, workers: int) -> tuple[Accuracy, Path]:
    """A file's runs predicted again."""
    from snugfit.cli.progress import telling
    from snugfit.evaluation.accuracy import rescore
    from snugfit.evaluation.accuracy_files import read, read_rates
    from snugfit.job.gpu import find_gpu
    from snugfit.report.text.files import writable_folder

    result = read(source)
    gpu = find_gpu(result.gpu)
    rates = read_rates(rates_file, gpu) if rates_file else None
    file = writable_folder(output) / f"{source.stem.removesuffix('-rescored')}-rescored.json"
    with telling() as tell:
        return rescore(result, gpu, file=file, rates=rates, workers=workers, tell=tell), file


def _answer(results: list[Accuracy], form: str, plot: Path | None) -> None:
    from snugfit.report.evaluation import accuracy as report
    from snugfit.report.text.terminal import show, show_json

    if plot is not None:
        from snugfit.report.evaluation.accuracy_plot import draw
        from snugfit.report.text.files import write_atomically

        write_atomically(plot, draw(results, plot.suffix[1:]))
    if form == "markdown":
        from snugfit.report.evaluation.accuracy_page import document

        typer.echo(document(results), nl=False)
        return
    for result in results:
        show_json(result.to_json()) if form == "json" else show(report.render(result))


def _read(path: Path) -> list[Accuracy]:
    """The results in a file, or in a folder's `accuracy-*.json`."""
    from snugfit.evaluation.accuracy_files import read

    files = sorted(path.glob("accuracy-*.json")) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"--show {path}: no accuracy-*.json there.")
    return [read(file) for file in files]
