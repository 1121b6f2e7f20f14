"""The command `snugfit guide`: the experiments of Hugging Face's guide, predicted and measured, as tables,
files and one plot.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from snugfit.cli import arguments as given
from snugfit.measurement.target import gpu_here
from snugfit.techniques.registry import picture

if TYPE_CHECKING:
    from snugfit.features.guide.result import GuideResult
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job

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
Inference = Annotated[
    bool,
    typer.Option(
        "--inference", help="Show instead the guide's backends for inference today, and its kinds of memory."
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
    inference: Inference = False,
    output: Output = Path("snugfit-guide"),
    workers: Workers = None,
    form: Format = "terminal",
    as_json: given.AsJson = False,
    **of_features: Any,
) -> None:
    """Predict (and with --measure run) the experiments of the Hugging Face single-GPU guide."""
    from snugfit.cli.progress import show_progress
    from snugfit.errors import GpuError, UsageError
    from snugfit.features.guide.suite import own_gpu
    from snugfit.job.gpu import find_gpu
    from snugfit.user_files import writable_folder

    form = "json" if as_json else form
    # A measurement is for this machine's GPU, even if another one is named.
    name = None if gpu and not measure else gpu_here()
    if measure and name is None:
        raise GpuError(
            "--measure: this machine has no GPU to run the experiments on. Leave it out to predict only."
        )
    target = find_gpu(gpu or name or own_gpu())
    folder = writable_folder(output)

    workers = workers or os.cpu_count() or 1
    if inference:
        if measure or modern or optimizers or form == "csv":
            raise UsageError(
                "--inference has its own tables. Leave --measure, --modern, --optimizers and csv out."
            )
        _print_inference(target, folder, workers, form, of_features)
        return
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
    paths = write(result, folder)
    given.hand_over(of_features, result)
    plot = _plot_of(paths)
    _print(result, form, plot)
    typer.echo("\n".join(f"Written: {path}" for path in paths), err=form != "terminal")


_PARAMETERS = [*inspect.signature(guide, eval_str=True).parameters.values()][:-1]
guide.__signature__ = inspect.Signature([*_PARAMETERS, *given.feature_parameters("guide")])  # type: ignore[attr-defined]


def write(result: GuideResult, folder: Path) -> list[Path]:
    """Write the guide's results as guide.md, guide.csv, guide.json, and pictures if the feature `page` draws
    them. Return their paths.
    """
    from snugfit.features.guide.tables import csv, markdown

    return _write(result, folder, "guide", markdown, {"csv": csv(result)})


def _write(
    result: Any, folder: Path, name: str, markdown: Callable[..., str], further: Mapping[str, str]
) -> list[Path]:
    """Write one result of the guide as Markdown, JSON and pictures, and in the `further` formats. Return the
    paths.
    """
    from snugfit.report.text.files import write_atomically

    drawn = {f"{name}.{form}": picture(result, form) for form in ("png", "svg")}
    pictures = {file: content for file, content in drawn.items() if content}
    contents = pictures | {
        f"{name}.md": markdown(result, plot=next(iter(pictures), "")).encode(),
        **{f"{name}.{form}": text.encode() for form, text in further.items()},
        f"{name}.json": json.dumps(result.to_json(), indent=2, allow_nan=False).encode() + b"\n",
    }
    return [write_atomically(folder / file, content) for file, content in contents.items()]


def _plot_of(paths: Sequence[Path]) -> str:
    """Return the file name of the picture among these paths; empty without one."""
    return next((path.name for path in paths if path.suffix == ".png"), "")


def _print_inference(gpu: Gpu, folder: Path, workers: int, form: str, of_features: Mapping[str, Any]) -> None:
    """Predict, write and print the guide's `torch.compile` backends, and its memory categories in text
    generation.
    """
    from snugfit.cli.progress import show_progress
    from snugfit.features.guide.inference import run_inference
    from snugfit.features.guide.inference_tables import markdown, render
    from snugfit.report.text.page import print_as

    with show_progress("predicting the guide's backends") as tell:
        result = run_inference(gpu, workers=workers, tell=tell)
    paths = _write(result, folder, "guide-inference", markdown, {})
    given.hand_over(of_features, result)
    if form == "markdown":
        typer.echo(markdown(result, plot=_plot_of(paths)), nl=False)
    else:
        print_as(form, result.to_json(), render(result))
    typer.echo("\n".join(f"Written: {path}" for path in paths), err=form != "terminal")


def _with_modern(result: GuideResult, gpu: Gpu, workers: int) -> GuideResult:
    """Return the result with the fastest recipe (training techniques) of today for each experiment. Plans are
    cached, as in `snugfit plan`.
    """
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


def _print(result: GuideResult, form: str, plot: str) -> None:
    from snugfit.features.guide.tables import csv, markdown, render
    from snugfit.report.text.page import print_as

    if form in ("csv", "markdown"):
        typer.echo(csv(result) if form == "csv" else markdown(result, plot=plot), nl=False)
    else:
        print_as(form, result.to_json(), render(result))
