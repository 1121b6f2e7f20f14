"""`snugfit accuracy`: drawn jobs, predicted and measured, and what is done with such results later.

It draws (each run a job of its own, or several recipes of each job, or each job's best recipes by its plan),
goes on with a draw that was only predicted or was interrupted, predicts one again with today's code, or shows
what there is. Options that exclude each other are refused before anything begins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snugfit.cli import arguments as given
from snugfit.cli.verify import planned_recipe, usual_workers
from snugfit.errors import GpuError, OutsideBand, UsageError
from snugfit.measurement.target import gpu_here

if TYPE_CHECKING:
    from snugfit.comparison.compared_runs import Accuracy
    from snugfit.evaluation.predict_runs import PlannedRecipe
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job

ORDER, LATER = "The order of recipes", "Results of an earlier draw"

Draw = Annotated[int, typer.Option("--draw", help="Number of jobs to draw.", min=1, max=1000)]
Seed = Annotated[int, typer.Option(help="Seed of the random draw.", min=0)]
WithinJob = Annotated[
    int | None, given.option(ORDER, "Draw R recipes for each job.", metavar="R", min=2, max=64)
]
Top = Annotated[
    int | None, given.option(ORDER, "Take the best K recipes of each job's plan.", metavar="K", min=2, max=64)
]
Jobs = Annotated[
    list[Path] | None,
    given.option(ORDER, "Use this job file instead of a drawn job. Can be repeated.", "--job"),
]
Output = Annotated[Path, typer.Option(help="Write the result into this folder.", file_okay=False)]
PredictOnly = Annotated[bool, typer.Option("--predict-only", help="Draw and predict, but do not measure.")]
Workers = Annotated[
    int | None, typer.Option(help="Number of processes that predict in parallel. [4, or one per core]", min=1)
]
Measure = Annotated[
    Path | None,
    given.option(
        LATER, "Measure on this machine what FILE only predicts, and write it into FILE.", metavar="FILE"
    ),
]
Rescore = Annotated[
    Path | None,
    given.option(LATER, "Predict the runs of FILE again. Measured values stay as they are.", metavar="FILE"),
]
RatesFile = Annotated[
    Path | None,
    given.option(LATER, "With --rescore: take the rates from this calibration.", "--rates", metavar="FILE"),
]
Show = Annotated[
    Path | None,
    given.option(LATER, "Show the results in this file or folder, without a new draw.", metavar="PATH"),
]
Plot = Annotated[
    Path | None,
    typer.Option(help="Plot the errors of the seconds into this .png or .svg file.", dir_okay=False),
]

DRAWS, OUTPUT = 16, Path("snugfit-accuracy")


def accuracy(
    *,
    draw: Draw = DRAWS,
    seed: Seed = 0,
    gpu: given.GpuName = None,
    gpus: given.Gpus = None,
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
    modes = {"within-job": within_job, "top": top, "measure": measure, "rescore": rescore, "show": show}
    chosen = [mode for mode, value in modes.items() if value is not None]
    _refuse(chosen, rates, job, plot)
    _refuse_idle(chosen, {
        "draw": draw != DRAWS, "seed": seed != 0, "gpu": gpu is not None, "gpus": gpus is not None,
        "predict-only": predict_only,
        "output": output != OUTPUT, "workers": workers is not None,
    })  # fmt: skip
    if gpus is not None and (within_job or top):
        raise UsageError("--gpus draws single runs. Leave --within-job and --top out.")
    if job and draw != DRAWS:
        raise UsageError(f"--draw {draw}: the jobs come from --job. Leave --draw out.")
    if show is not None:
        _print(_read(show), form, plot)
        return
    workers = workers or usual_workers()
    if measure is not None:
        result, file = _measure(measure)
    elif rescore is not None:
        result, file = _rescore(rescore, rates, output, workers)
    else:
        recipes, named = within_job or top, job or []
        kind = "within-job" if within_job else "top" if top else "drawn"
        known_gpu = _gpu(gpu, predict_only)
        result, file = _draw(
            kind, recipes or 0, known_gpu, output, workers, draw, seed, named, measured=not predict_only,
            gpus=gpus or 1,
        )  # fmt: skip
    _print([result], form, plot)
    typer.echo(f"Written: {file}", err=form != "terminal")
    if result.outside:
        raise OutsideBand(f"{len(result.outside)} of {len(result.runs)} runs are outside the band.")


def _refuse(modes: list[str], rates: Path | None, jobs: list[Path] | None, plot: Path | None) -> None:
    """Raises `UsageError` for options that exclude each other."""
    from snugfit.report.text.files import check_output

    if len(modes) > 1:
        shown = " and ".join(f"--{mode}" for mode in modes)
        raise UsageError(f"{shown} cannot be used together. Give one of them.")
    if rates is not None and modes != ["rescore"]:
        raise UsageError(
            "--rates works only with --rescore. A draw uses this GPU's own rates (snugfit calibrate)."
        )
    if jobs and modes not in (["within-job"], ["top"]):
        raise UsageError("--job replaces the drawn jobs. It works only with --within-job or --top.")
    check_output("--plot", plot, (".png", ".svg"), given.PLOT_FILE)


def _refuse_idle(modes: Collection[str], given_options: Mapping[str, bool]) -> None:
    """Raises `UsageError` for options that say how to draw, where nothing is drawn."""
    for mode in {"show", "measure", "rescore"}.intersection(modes):
        used = ("output", "workers") if mode == "rescore" else ()
        for option, is_given in given_options.items():
            if is_given and option not in used:
                raise UsageError(
                    f"--{option} changes how jobs are drawn, and --{mode} draws none. Leave it out."
                )


def _gpu(name: str | None, predict_only: bool) -> Gpu:
    """The GPU to predict for; measuring needs one here."""
    from snugfit.job.gpu import find_gpu

    of_this_machine = gpu_here()
    if of_this_machine is None and not predict_only:
        raise GpuError("This machine has no GPU to measure on. Try --predict-only --gpu NAME.")
    if name is None and of_this_machine is None:
        raise GpuError("No GPU to predict for. Add --gpu NAME; `snugfit gpus` lists the names.")
    return find_gpu(name or of_this_machine or "")


def _draw(
    kind: str,
    recipes: int,
    gpu: Gpu,
    output: Path,
    workers: int,
    count: int,
    seed: int,
    files: list[Path],
    *,
    measured: bool,
    gpus: int = 1,
) -> tuple[Accuracy, Path]:
    """A new draw of the `kind` that was asked for, with its file."""
    from snugfit.cli.progress import show_progress
    from snugfit.evaluation import accuracy as draws
    from snugfit.report.evaluation.accuracy import file_name
    from snugfit.report.text.files import writable_folder

    named = [_job(file) for file in files]
    stem = "-".join(file.stem for file in files)[:80] or f"seed{seed}"
    stem = f"{stem}-gpus{gpus}" if gpus > 1 else stem
    file = writable_folder(output) / file_name(stem, kind, recipes)
    with show_progress("measuring" if measured else "predicting") as tell:
        writer = draws.DrawWriter(file, measured, tell)
        if kind == "within-job":
            result = draws.accuracy_within_jobs(seed, named or count, recipes, gpu, writer, workers=workers)
        elif kind == "top":
            jobs, rank = named or draws.draw_jobs(seed, count), _ranking(gpu, recipes, workers, tell)
            drawn_from = None if named else seed
            result = draws.accuracy_of_best(jobs, recipes, rank, gpu, writer, seed=drawn_from)
        else:
            result = draws.accuracy(seed, count, gpu, writer, gpus=gpus, workers=workers)
    return result, file


def _ranking(
    gpu: Gpu, count: int, workers: int, tell: Callable[[str], None]
) -> Callable[[Job], list[PlannedRecipe]]:
    """A function that gives a job's best recipes by its plan."""
    from snugfit.planning.search.search import plan

    def rank(job: Job) -> list[PlannedRecipe]:
        ranked = plan(job, gpu=gpu, headroom=0, ranked=count, workers=workers, tell=tell).ranked
        return [planned_recipe(choice) for choice in ranked]

    return rank


def _job(file: Path) -> Job:
    """The job in a job file, which must not name a recipe."""
    from snugfit.cli.request import Request
    from snugfit.techniques.recipe import Recipe

    request = Request.read({"job_file": file})
    if request.recipe != Recipe():
        raise UsageError(
            f"{file}: this job file names a recipe, but here recipes are drawn or planned. Remove the recipe."
        )
    return request.job


def _measure(file: Path) -> tuple[Accuracy, Path]:
    """A result that is only predicted, or partly measured, measured here to its end."""
    from snugfit.cli.progress import show_progress
    from snugfit.evaluation.accuracy import measure_rest
    from snugfit.evaluation.accuracy_files import read
    from snugfit.job.gpu import find_gpu

    result, name = read(file), gpu_here()
    if name is None:
        raise GpuError("This machine has no GPU to measure on.")
    if find_gpu(name).key != find_gpu(result.gpu).key:
        raise GpuError(f"{file} has predictions for {result.gpu}, but the GPU of this machine is {name}.")
    with show_progress("measuring") as tell:
        return measure_rest(result, file=file, tell=tell), file


def _rescore(source: Path, rates_file: Path | None, output: Path, workers: int) -> tuple[Accuracy, Path]:
    """A file's runs predicted again by today's code, with the new file."""
    from snugfit.cli.progress import show_progress
    from snugfit.evaluation.accuracy import rescore
    from snugfit.evaluation.accuracy_files import read, read_rates
    from snugfit.job.gpu import find_gpu
    from snugfit.report.text.files import writable_folder

    result = read(source)
    gpu = find_gpu(result.gpu)
    rates = read_rates(rates_file, gpu) if rates_file else None
    file = writable_folder(output) / f"{source.stem.removesuffix('-rescored')}-rescored.json"
    with show_progress("predicting") as tell:
        return rescore(result, gpu, file=file, rates=rates, workers=workers, tell=tell), file


def _print(results: list[Accuracy], form: str, plot: Path | None) -> None:
    """Prints the results, and draws the plot when one was asked for."""
    from snugfit.report.evaluation.accuracy import render
    from snugfit.report.text.page import print_as

    if plot is not None:
        from snugfit.report.evaluation.accuracy_plot import draw
        from snugfit.report.text.files import write_atomically

        write_atomically(plot, draw(results, plot.suffix[1:]))
    if form == "markdown":
        from snugfit.report.evaluation.accuracy_page import document

        typer.echo(document(results), nl=False)
        return
    for result in results:
        print_as(form, result.to_json(), render(result))


def _read(path: Path) -> list[Accuracy]:
    """The results in a file, or in a folder's `accuracy-*.json`."""
    from snugfit.evaluation.accuracy_files import read

    files = sorted(path.glob("accuracy-*.json")) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"--show {path}: found no accuracy-*.json file.")
    return [read(file) for file in files]
