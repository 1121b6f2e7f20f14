"""The command `snugfit accuracy`: memory and step time of training recipes, predicted and measured.

It takes several recipes of each training job: random ones, or the best of the job's plan. It also continues a
result that was only predicted or was interrupted, predicts one again with today's code, or shows results.
Options that exclude each other are refused before the work begins.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snugfit.cli import arguments as given
from snugfit.errors import GpuError, OutsideBand, UsageError
from snugfit.measurement.target import gpu_here

if TYPE_CHECKING:
    from snugfit.features.accuracy.compared_runs import Accuracy
    from snugfit.features.accuracy.predict_runs import PlannedRecipe
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job

ORDER, LATER = "The order of recipes", "Earlier results"

Seed = Annotated[int, typer.Option(help="With --within-job: seed of the recipes.", min=0)]
WithinJob = Annotated[
    int | None, given.option(ORDER, "Draw R recipes for each job.", metavar="R", min=2, max=64)
]
Top = Annotated[
    int | None, given.option(ORDER, "Take the best K recipes of each job's plan.", metavar="K", min=2, max=64)
]
Jobs = Annotated[
    list[Path] | None,
    given.option(ORDER, "The job in this file. Can be repeated.", "--job"),
]
Output = Annotated[Path, typer.Option(help="Write the result into this folder.", file_okay=False)]
PredictOnly = Annotated[bool, typer.Option("--predict-only", help="Predict, but do not measure.")]
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
    given.option(LATER, "Show the results in this file or folder.", metavar="PATH"),
]
Plot = Annotated[
    Path | None,
    given.file_option(
        "--plot", "Plot the errors of the seconds into this .png or .svg file.", *given.PLOT_FILE
    ),
]

OUTPUT = Path("snugfit-accuracy")

MOST_WORKERS = 4
"""Default limit on the processes that predict. More would slow down the host while steps are timed."""


def accuracy(
    *,
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
    """Predict and measure several training recipes of each job, and print the relative errors of the
    predictions.
    """
    form = "json" if as_json else form
    modes = {"within-job": within_job, "top": top, "measure": measure, "rescore": rescore, "show": show}
    chosen = [mode for mode, value in modes.items() if value is not None]
    _refuse(chosen, rates, job)
    _refuse_idle(chosen, {
        "seed": seed != 0, "gpu": gpu is not None, "predict-only": predict_only, "output": output != OUTPUT,
        "workers": workers is not None,
    })  # fmt: skip
    if show is not None:
        _print(_read(show), form, plot)
        return
    workers = workers or min(MOST_WORKERS, os.cpu_count() or 1)
    if measure is not None:
        result, file = _measure(measure)
    elif rescore is not None:
        result, file = _rescore(rescore, rates, output, workers)
    else:
        jobs, known_gpu, measured = job or [], _gpu(gpu, predict_only), not predict_only
        drawn = seed if within_job else None
        recipes = within_job or top or 0
        result, file = _compare(jobs, recipes, drawn, known_gpu, output, workers, measured=measured)
    _print([result], form, plot)
    # For the formats other than the terminal's, stdout contains only the document.
    typer.echo(f"Written: {file}", err=form != "terminal")
    if result.outside:
        raise OutsideBand(
            f"{len(result.outside)} of {len(result.runs)} runs have larger errors than allowed. The "
            f"table marks them."
        )


def _refuse(modes: list[str], rates: Path | None, jobs: list[Path] | None) -> None:
    """Raise `UsageError` for options that exclude each other."""
    if len(modes) > 1:
        shown = " and ".join(f"--{mode}" for mode in modes)
        raise UsageError(f"{shown} cannot be used together. Give one of them.")
    if rates is not None and modes != ["rescore"]:
        raise UsageError(
            "--rates works only with --rescore. New predictions use this GPU's own rates (snugfit calibrate)."
        )
    takes_jobs = modes in (["within-job"], ["top"])
    if jobs and not takes_jobs:
        raise UsageError("--job works only with --within-job or --top.")
    if takes_jobs and not jobs:
        raise UsageError(f"--{modes[0]} takes recipes of your jobs. Add --job FILE.")
    if not modes:
        raise UsageError(
            "Nothing to compare. Add --job FILE with --top K or --within-job R, or read results with --show, "
            "--measure or --rescore."
        )


def _refuse_idle(modes: Collection[str], given_options: Mapping[str, bool]) -> None:
    """Raise `UsageError` for options that only apply to new measurements, if this call starts none."""
    for mode in {"show", "measure", "rescore"}.intersection(modes):
        used = ("output", "workers") if mode == "rescore" else ()
        for option, is_given in given_options.items():
            if is_given and option not in used:
                raise UsageError(
                    f"--{option} is for new runs, and --{mode} reads earlier ones. Leave it out."
                )


def _gpu(name: str | None, predict_only: bool) -> Gpu:
    """Return the GPU to predict for. Unless `predict_only`, this machine must have it, for the
    measurements.
    """
    from snugfit.job.gpu import find_gpu

    of_this_machine = gpu_here()
    if of_this_machine is None and not predict_only:
        raise GpuError("This machine has no GPU to measure on. Try --predict-only --gpu NAME.")
    if name is None and of_this_machine is None:
        raise GpuError("No GPU to predict for. Add --gpu NAME; `snugfit gpus` lists the names.")
    return find_gpu(name or of_this_machine or "")


def _compare(
    files: list[Path],
    recipes: int,
    seed: int | None,
    gpu: Gpu,
    output: Path,
    workers: int,
    *,
    measured: bool,
) -> tuple[Accuracy, Path]:
    """Predict and measure `recipes` training recipes of each job, and return the result with its file. The
    recipes are drawn by `seed`, or are the best of the job's plan.
    """
    from snugfit.cli.progress import show_progress
    from snugfit.features.accuracy.score import RunWriter, accuracy_of_best, accuracy_within_jobs
    from snugfit.features.accuracy.tables import file_name
    from snugfit.user_files import writable_folder

    jobs = [_job(file) for file in files]
    kind = "top" if seed is None else "within-job"
    file = writable_folder(output) / file_name("-".join(file.stem for file in files)[:80], kind, recipes)
    with show_progress("measuring" if measured else "predicting") as tell:
        writer = RunWriter(file, measured, tell)
        if seed is None:
            rank = rank_by_plan(gpu, recipes, workers, tell)
            return accuracy_of_best(jobs, recipes, rank, gpu, writer, seed=None), file
        return accuracy_within_jobs(seed, jobs, recipes, gpu, writer, workers=workers), file


def rank_by_plan(
    gpu: Gpu, count: int, workers: int, tell: Callable[[str], None]
) -> Callable[[Job], list[PlannedRecipe]]:
    """Return a function that plans a job and returns its `count` fastest recipes."""
    from snugfit.features.accuracy.predict_runs import PlannedRecipe
    from snugfit.planning.search.search import plan

    def rank(job: Job) -> list[PlannedRecipe]:
        ranked = plan(job, gpu=gpu, headroom=0, ranked=count, workers=workers, tell=tell).ranked
        return [PlannedRecipe.of(choice) for choice in ranked]

    return rank


def _job(file: Path) -> Job:
    """Return the job in a job file, which must not name a recipe."""
    from snugfit.cli.request import Request
    from snugfit.techniques.recipe import Recipe

    request = Request.read({"job_file": file})
    if request.recipe != Recipe():
        raise UsageError(
            f"{file}: this job file names a recipe, but --within-job draws recipes and --top plans them. "
            "Remove the recipe."
        )
    return request.job


def _measure(file: Path) -> tuple[Accuracy, Path]:
    """Read a result from a file and measure its unmeasured runs on this machine. Return it with its file."""
    from snugfit.cli.progress import show_progress
    from snugfit.features.accuracy.files import read
    from snugfit.features.accuracy.score import measure_rest
    from snugfit.job.gpu import find_gpu

    result, name = read(file), gpu_here()
    if name is None:
        raise GpuError("This machine has no GPU to measure on. Use a machine with a GPU.")
    if find_gpu(name).key != find_gpu(result.gpu).key:
        raise GpuError(
            f"{file} has predictions for {result.gpu}, but the GPU of this machine is {name}. Measure on a "
            f"machine with {result.gpu}, or predict for this one: snugfit accuracy --job FILE --top 4."
        )
    with show_progress("measuring") as tell:
        return measure_rest(result, file=file, tell=tell), file


def _rescore(source: Path, rates_file: Path | None, output: Path, workers: int) -> tuple[Accuracy, Path]:
    """Predict the runs of a result file again with today's code. Return the result and its new file."""
    from snugfit.cli.progress import show_progress
    from snugfit.features.accuracy.files import read, read_rates
    from snugfit.features.accuracy.score import rescore
    from snugfit.job.gpu import find_gpu
    from snugfit.user_files import writable_folder

    result = read(source)
    gpu = find_gpu(result.gpu)
    rates = read_rates(rates_file, gpu) if rates_file else None
    file = writable_folder(output) / f"{source.stem.removesuffix('-rescored')}-rescored.json"
    with show_progress("predicting") as tell:
        return rescore(result, gpu, file=file, rates=rates, workers=workers, tell=tell), file


def _print(results: list[Accuracy], form: str, plot: Path | None) -> None:
    """Print accuracy results in the format `form`, and write the plot of their errors to `plot` if given."""
    from snugfit.features.accuracy.tables import render
    from snugfit.report.text.page import print_as

    if plot is not None:
        from snugfit.features.accuracy.scatter import draw
        from snugfit.report.text.files import write_atomically

        write_atomically(plot, draw(results, plot.suffix[1:]))
    if form == "markdown":
        from snugfit.features.accuracy.markdown import document

        typer.echo(document(results), nl=False)
        return
    for result in results:
        print_as(form, result.to_json(), render(result))


def _read(path: Path) -> list[Accuracy]:
    """Return the accuracy results in a file, or in the files `accuracy-*.json` of a folder."""
    from snugfit.features.accuracy.files import read

    files = sorted(path.glob("accuracy-*.json")) if path.is_dir() else [path]
    if not files:
        raise UsageError(
            f"--show {path}: found no accuracy-*.json file. Name a folder into which snugfit accuracy wrote."
        )
    return [read(file) for file in files]
