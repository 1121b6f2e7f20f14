"""The command `snugfit predict`: the memory and the time of a training step, predicted without running it.

Exit code 3 when it does not fit, for use in scripts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from snugfit.cli import arguments as given
from snugfit.cli.request import Request
from snugfit.errors import NothingFits, UsageError
from snugfit.techniques.registry import hooks
from snugfit.units import show_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from snugfit.comparison.recipes import RecipeComparison
    from snugfit.results.prediction import Prediction
    from snugfit.techniques.recipe import Recipe


def _software(name: str) -> str:
    from snugfit.prediction.profile import find_software

    return find_software(name).name


Software = Annotated[
    str | None,
    given.option(
        given.HOW,
        "Software of the prediction: installed, or the name of a profile. \\[installed]",
        parser=_software,
        metavar="<str>",
    ),
]
Largest = Annotated[
    str | None,
    given.option(
        given.WHERE,
        "Find the largest batch, or the longest sequence-length, that fits and leaves the headroom. Further "
        "phases have further sizes.",
        metavar="SIZE",
    ),
]
Compare = Annotated[
    list[str] | None,
    given.option(given.HOW, "Also predict this recipe, side by side. Can be repeated.", metavar="RECIPE"),
]
Operators = Annotated[
    bool, typer.Option("--operators", help="Also show FLOPs, bytes and kernels by group of operators.")
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
    fresh: given.Fresh = False,
    details: given.Details = False,
    quiet: given.Quiet = False,
    as_json: given.AsJson = False,
) -> int:
    """Predict the memory of a training step, without a GPU."""
    _check_options(request, compare, largest, operators=operators)
    request = request.with_least(fresh=fresh)
    for formula in hooks("predict_by_formula"):
        if (answer := formula(request)) is not None:
            return _show_formula(answer, quiet=quiet, as_json=as_json)
    predictions = (
        [_largest(request, largest, quiet=as_json or quiet, fresh=fresh)]
        if largest
        else _predict_all(request, compare or [], fresh=fresh)
    )
    predictions = [
        replace(one, doubts=(*one.doubts, *request.doubts), read_in_full=not request.doubts)
        for one in predictions
    ]
    for changes in hooks("changes_that_fit"):
        predictions = changes().with_ways_out(request, predictions)
    _print(predictions, operators=operators, details=details, quiet=quiet, as_json=as_json)
    given.hand_over(request.flags, predictions[0] if len(predictions) == 1 else _side_by_side(predictions))
    return NothingFits.exit_code if all(one.fits is False for one in predictions) else 0


def _show_formula(answer: Any, *, quiet: bool, as_json: bool) -> int:
    """Print the answer of a feature, and return the command's exit code."""
    from snugfit.report.show import render
    from snugfit.report.text.page import print_as

    document = answer.to_json() if as_json else {}
    print_as("json" if as_json else "terminal", document, render(answer), quiet=quiet)
    return NothingFits.exit_code if answer.fits is False else 0


def _check_options(
    request: Request, compared: list[str] | None, largest: str | None, *, operators: bool
) -> None:
    """Raise `UsageError` for options that do not go together, before long work begins."""
    if largest and compared:
        raise UsageError("--largest and --compare cannot be used together. Give one of them.")
    if operators and compared:
        raise UsageError("--operators shows one recipe. Leave --compare out.")
    if request.headroom and request.gpu is None and request.memory_bytes is None:
        raise UsageError(
            f"--headroom {request.headroom} needs a memory limit. Add --gpu NAME or --memory 24GiB."
        )
    if largest:
        from snugfit.planning.largest import field_of

        field_of(request.job, largest)
    if largest and request.has_auto:
        raise UsageError("--largest is for one recipe, so it takes none with 'auto'. Try 'every_layer'.")


def _predict_all(request: Request, compared: list[str], *, fresh: bool) -> list[Prediction]:
    from snugfit.techniques.recipe import Recipe

    name = request.job.model.name
    # A recipe that the user gave twice is one row of the table.
    recipes = list(dict.fromkeys([request.recipe, *(Recipe.parse(text) for text in compared)]))
    firsts = [f"predicting {name} under {one}" if compared else f"predicting {name}" for one in recipes]
    return [_predict(request, one, first, fresh=fresh) for one, first in zip(recipes, firsts, strict=True)]


def _predict(request: Request, recipe: Recipe, first: str, *, fresh: bool) -> Prediction:
    """Return the prediction of the command's job under this recipe, from the cache or computed."""
    from snugfit.cli.plan_cache import answer
    from snugfit.results.prediction import Prediction

    options: dict[str, Any] = {
        "memory_bytes": request.memory_bytes,
        "headroom": request.headroom,
        "loop": request.loop,
        "software": request.software,
    }

    def compute(tell: Callable[[str], None]) -> Prediction:
        from snugfit.deferred_imports import defer_imports
        from snugfit.prediction.predict import predict as foresee

        defer_imports()
        for changes in hooks("changes_that_fit"):
            changes().prepare_search(request)
        return foresee(request.job, recipe, gpu=request.gpu, gpus=request.gpus, **options)

    return answer(
        Prediction.from_json,
        compute,
        request.job,
        request.gpu,
        fresh=fresh,
        first=first,
        what="prediction",
        recipe=str(recipe),
        # `key_of` includes the GPU's rates for each number of GPUs in this list.
        gpus=[request.gpus],
        **options,
    )


def _largest(request: Request, of: str, *, quiet: bool, fresh: bool) -> Prediction:
    if request.gpu is None and request.memory_bytes is None:
        raise UsageError("--largest needs a memory limit. Add --gpu NAME or --memory 24GiB.")
    if request.software != "installed":
        raise UsageError("--largest works for the installed software only. Leave --software out.")
    if request.gpus != 1:
        raise UsageError("--largest is for one GPU. Leave --gpus out.")
    from snugfit.cli.plan_cache import answer
    from snugfit.planning.largest import LargestFit, largest

    options: dict[str, Any] = {
        "memory_bytes": request.memory_bytes,
        "headroom": request.headroom,
        "loop": request.loop,
        "of": of,
    }
    size, prediction = answer(
        LargestFit.from_json,
        lambda tell: LargestFit(*largest(request.job, request.recipe, gpu=request.gpu, **options)),
        request.job,
        request.gpu,
        fresh=fresh,
        first=f"predicting {request.job.model.name} at several sizes",
        what="largest",
        recipe=str(request.recipe),
        **options,
    )
    if not quiet:
        headroom = show_bytes(prediction.headroom_bytes) if prediction.headroom_bytes else "none"
        typer.echo(f"Largest {of.replace('-', ' ')} that fits: {size:,} (headroom: {headroom})\n")
    return prediction


def _side_by_side(predictions: list[Prediction]) -> RecipeComparison:
    from snugfit.comparison.recipes import RecipeComparison

    return RecipeComparison(tuple(predictions))


def _print(
    predictions: list[Prediction], *, operators: bool, details: bool, quiet: bool, as_json: bool
) -> None:
    """Print the predictions: a short report, or the whole report for `details` and `operators`."""
    from snugfit.report.text.page import print_as

    form, several = "json" if as_json else "terminal", len(predictions) > 1
    if several:
        from snugfit.report import compare

        together = _side_by_side(predictions).to_json() if as_json else {}
        print_as(form, together, compare.render(predictions, details=details), quiet=quiet)
    elif (details or operators) and not (as_json or quiet):
        from snugfit.report import prediction
        from snugfit.report.text.terminal import show

        show(prediction.render(predictions[0], operators=operators))
    else:
        from snugfit.report import short

        document = predictions[0].to_json() if as_json else {}
        print_as(form, document, short.render(predictions[0]), quiet=quiet)
