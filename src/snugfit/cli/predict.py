"""`snugfit predict`: bytes before anything runs.

Exit code 3 when it does not fit, so that a script can ask.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from snugfit.cli import arguments as given
from snugfit.cli.export import Into, check_export, write_export
from snugfit.cli.request import Request
from snugfit.errors import NothingFits, UsageError

if TYPE_CHECKING:
    from snugfit.comparison.recipes import RecipeComparison
    from snugfit.results.prediction import Prediction

Software = Annotated[
    str | None,
    given.option(
        given.HOW,
        "Which software to predict for: installed, or a profile such as published-2022. \\[installed]",
    ),
]
Largest = Annotated[
    Literal["batch", "sequence-length"] | None,
    given.option(given.WHERE, "Find the largest batch, or the longest sequence, that fits."),
]
Compare = Annotated[
    list[str] | None,
    given.option(given.HOW, "Also predict this recipe, side by side. Can be repeated.", metavar="RECIPE"),
]
Operators = Annotated[
    bool, typer.Option("--operators", help="Also show FLOPs, bytes and kernels by group of operators.")
]

TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="Write the predicted step for PyTorch's memory viewer (FILE.pickle), or as a timeline for "
        "Perfetto (FILE.json).",
        dir_okay=False,
        metavar="FILE",
    ),
]


@given.about_a_job
def predict(
    request: Request,
    *,
    gpus: given.Gpus = None,
    mesh: given.Mesh = None,
    routing: given.Routing = None,
    compare: Compare = None,
    software: Software = None,
    memory: given.Memory = None,
    headroom: given.Headroom = None,
    largest: Largest = None,
    operators: Operators = False,
    html: given.Html = None,
    plot: given.Plot = None,
    trace: TraceFile = None,
    export: Into = None,
    as_json: given.AsJson = False,
) -> int:
    """Predict the memory of a training step, without a GPU."""
    if largest and compare:
        raise UsageError("--largest and --compare cannot be used together. Give one of them.")
    if operators and compare:
        raise UsageError("--operators shows one recipe. Leave --compare out.")
    if export and compare:
        raise UsageError("--export writes one recipe. Leave --compare out.")
    if largest and request.has_auto:
        raise UsageError("--largest asks about one recipe, so it takes none with 'auto'. Try 'every_layer'.")
    request = request.with_least()
    check_export(export, request.job)
    if trace:
        _check_trace(trace, request, compare)
    predictions = (
        [_largest(request, largest, quiet=as_json)] if largest else _predict_all(request, compare or [])
    )
    _print(predictions, operators=operators, as_json=as_json)
    given.write_pictures(html, plot, predictions[0] if len(predictions) == 1 else _side_by_side(predictions))
    if trace:
        from snugfit.prediction.traces.export_trace import export_trace
        from snugfit.report.text.files import write_atomically

        write_atomically(trace, export_trace(predictions[0], trace.suffix))
        given.say_written(trace)
    answer = predictions[0]
    recipe = None if answer.fits is False else str(answer.recipe)
    write_export(export, answer.job, recipe, answer.gpus)
    return NothingFits.exit_code if all(one.fits is False for one in predictions) else 0


def _check_trace(path: Path, request: Request, compared: list[str] | None) -> None:
    """Raises `UsageError` for a trace that could not be made, before long work begins."""
    if compared:
        raise UsageError("--trace writes one recipe. Leave --compare out.")
    if path.suffix == ".json" and request.gpu is None:
        raise UsageError("--trace FILE.json is a timeline in seconds, which need a GPU. Add --gpu NAME.")


def _predict_all(request: Request, compared: list[str]) -> list[Prediction]:
    from snugfit.prediction.predict import predict as foresee
    from snugfit.techniques.recipe import Recipe

    recipes = [request.recipe, *(Recipe.parse(text) for text in compared)]
    return [
        foresee(
            request.job,
            recipe,
            gpu=request.gpu,
            gpus=request.gpus,
            memory_bytes=request.memory_bytes,
            headroom=request.headroom,
            loop=request.loop,
            software=request.software,
        )
        for recipe in recipes
    ]


def _largest(request: Request, of: str, *, quiet: bool) -> Prediction:
    if request.gpu is None and request.memory_bytes is None:
        raise UsageError("--largest needs a limit. Add --gpu NAME or --memory 24GiB.")
    if request.software != "installed":
        raise UsageError("--largest works for the installed software only. Leave --software out.")
    if request.gpus != 1:
        raise UsageError("--largest is for one GPU. Leave --gpus out.")
    from snugfit.planning.largest import largest as search

    size, prediction = search(
        request.job,
        request.recipe,
        gpu=request.gpu,
        memory_bytes=request.memory_bytes,
        headroom=request.headroom,
        loop=request.loop,
        of=of,
    )
    if not quiet:
        typer.echo(f"Largest {of.replace('-', ' ')} that fits: {size:,}\n")
    return prediction


def _side_by_side(predictions: list[Prediction]) -> RecipeComparison:
    from snugfit.comparison.recipes import RecipeComparison

    return RecipeComparison(tuple(predictions))


def _print(predictions: list[Prediction], *, operators: bool, as_json: bool) -> None:
    from snugfit.report import compare, prediction
    from snugfit.report.text.terminal import show, show_json

    if as_json:
        show_json(predictions[0].to_json() if len(predictions) == 1 else _side_by_side(predictions).to_json())
    elif len(predictions) == 1:
        show(prediction.render(predictions[0], operators=operators))
    else:
        show(compare.render(predictions))
