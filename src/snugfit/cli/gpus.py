"""The command `snugfit gpus`: list the known GPUs, or compare plans for a job on each of them, alone or
several together.

Both forms share a table of GPUs. Without a job, an option for plans is an error. Exit code 3 when none of the
GPUs trains the job.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from snugfit.cli import arguments as given
from snugfit.cli.plan import Fidelity, Free, Keep, Samples, Steps, Workers
from snugfit.errors import NothingFits, UsageError
from snugfit.planning.several_gpus import group_plans

if TYPE_CHECKING:
    from snugfit.cli.request import Request
    from snugfit.job.gpu import Gpu
    from snugfit.planning.fleet.gpu_plans import GpuPlans
    from snugfit.planning.fleet.prices import Prices
    from snugfit.techniques.recipe import Recipe

MONEY = "What it costs"

Names = Annotated[
    list[str] | None,
    typer.Argument(
        help="Show only these: h200, v100-16gb, 'rtx 4090'. A single GPU is shown with its sources."
    ),
]
For = Annotated[
    str | None,
    given.option(
        given.JOB,
        "Plan the training of this model on each GPU: a preset, a folder, ...",
        "--for",
        metavar="MODEL",
    ),
]
Objective = Annotated[
    Literal["speed", "memory", "cost"],
    given.option(
        given.HOW,
        "The aim: the fastest that fits, the smallest, or the cheapest. Also the order of the table.",
    ),
]
PriceFile = Annotated[
    Path | None, given.option(MONEY, "YAML or JSON file of prices: GPU name, USD per hour.", "--prices")
]
Price = Annotated[
    list[str] | None,
    given.option(
        MONEY, "Price of one GPU, in USD per hour: h200=2.5. Can be repeated.", "--price", metavar="NAME=USD"
    ),
]

Cards = Annotated[
    str | None,
    given.option(
        given.WHERE,
        "Numbers of GPUs of one model that train together: 1..64 for powers of two, or 2,4,6. \\[1]",
        "--gpus",
        metavar="N",
    ),
]

_JOB = given.job_parameters("gpus", without=("model", "loop", "gpu"))

_OF_FEATURES = given.job_options("gpus")


def _arguments(
    names: Names = None,
    for_model: For = None,
    *,
    gpus: Cards = None,
    headroom: given.Headroom = None,
    fidelity: Fidelity = "rounds",
    objective: Objective = "speed",
    keep: Keep = None,
    free: Free = None,
    prices: PriceFile = None,
    price: Price = None,
    samples: Samples = None,
    steps: Steps = None,
    workers: Workers = None,
    fresh: given.Fresh = False,
    details: given.Details = False,
    quiet: given.Quiet = False,
    form: given.Format = "terminal",
    as_json: given.AsJson = False,
) -> None:
    """Declare the parameters of the command, in addition to those of a job."""


def gpus(**arguments: Any) -> int:
    """List the GPUs that snugfit has data for, show one with its sources, or plan a job on each of them."""
    from snugfit.job.gpu import all_gpus, find_gpus

    named = [gpu for name in arguments["names"] or () for gpu in find_gpus(name)]
    # One name may match several GPUs, and two names the same GPU.
    listed = list({gpu.key: gpu for gpu in named or all_gpus()}.values())
    if arguments["for_model"] or arguments["job_file"] or any(arguments[name] for name in _OF_FEATURES):
        return _plan(listed, arguments)
    _refuse_without_job(arguments)
    _list(listed, arguments)
    return 0


_OWN = list(inspect.signature(_arguments, eval_str=True).parameters.values())
gpus.__signature__ = inspect.Signature([*_OWN[:2], *_JOB, *_OWN[2:]])  # type: ignore[attr-defined]


def _refuse_without_job(arguments: Mapping[str, Any]) -> None:
    listing = ("names", "form", "as_json")
    for parameter in (*_JOB, *_OWN):
        if parameter.name not in listing and arguments[parameter.name] not in (
            parameter.default,
            None,
            [],
            (),
        ):
            flag = parameter.name.replace("_", "-")
            raise UsageError(f"--{flag} needs a model. Add --for MODEL.")
    if arguments["form"] == "markdown":
        raise UsageError("--format markdown needs a model. Add --for MODEL, or leave it out.")


def _list(gpus: Sequence[Gpu], arguments: Mapping[str, Any]) -> None:
    from snugfit.report.gpus import render, render_one
    from snugfit.report.text.terminal import show, show_json

    if arguments["as_json"] or arguments["form"] == "json":
        show_json({"schema": 1, "what": "gpus", "gpus": [gpu.to_json() for gpu in gpus]})
    else:
        show(render_one(gpus[0]) if len(gpus) == 1 else render(gpus))


# ---- the same plan on each ---------------------------------------------------------------------------------


def _plan(gpus: Sequence[Gpu], arguments: Mapping[str, Any]) -> int:
    from snugfit.cli.request import steps_of

    prices = _read_prices(arguments["prices"], arguments["price"] or ())
    if arguments["objective"] == "cost" and not prices.per_hour:
        raise UsageError("--objective cost needs prices: add --prices FILE, or --price h200=2.5 and so on.")
    about_job = {parameter.name: arguments[parameter.name] for parameter in _JOB}
    of_plan = {name: arguments[name] for name in ("gpus", "headroom", "keep", "free")}
    request = given.read_request(about_job | of_plan | {"model": arguments["for_model"]}, "gpus")
    _refuse(request, arguments)
    if arguments["gpus"] is not None or request.gpus != 1:
        return int(group_plans().print_cards(request, gpus, prices, arguments))
    steps = steps_of(arguments["samples"], arguments["steps"], request.job.batch_size)
    answers = _answers(request, gpus, steps, arguments)
    _print(answers, prices, arguments)
    given.hand_over(request.flags, answers)
    return 0 if answers.fitting else NothingFits.exit_code


def _refuse(request: Request, arguments: Mapping[str, Any]) -> None:
    """Raise `UsageError` for keys of a job file that do not apply to plans for many GPUs."""
    request.refuse_loop()
    if _fixed_recipe(request, arguments) and (request.keep or request.free):
        raise UsageError(
            "--recipe sets every technique, so --keep and --free have no effect. Leave --recipe out, or the "
            "other two."
        )
    if request.gpu or request.memory_bytes:
        raise UsageError(
            "gpu and memory cannot be given here. Name GPUs after `snugfit gpus`, or none for all of them."
        )


def _answers(
    request: Request, gpus: Sequence[Gpu], steps: int | None, arguments: Mapping[str, Any]
) -> GpuPlans:
    from snugfit.planning.fleet.gpu_plans import GpuPlans
    from snugfit.planning.fleet.search_gpus import plan_gpus

    fixed = _fixed_recipe(request, arguments)
    answers: GpuPlans = request.answer_of(
        plan_gpus,
        GpuPlans,
        gpus,
        arguments,
        "gpus",
        # For a given GPU and rent per hour, the fastest recipe also costs the least money.
        objective="speed" if arguments["objective"] == "cost" else arguments["objective"],
        steps=steps,
        start=str(request.recipe) if request.configuration and not fixed else None,
        **({"keep": {technique.slot: technique for technique in fixed}} if fixed else {}),
    )
    plans = tuple(replace(one, doubts=(*one.doubts, *request.doubts)) for one in answers.answers)
    # The requested objective orders the table of GPUs, even if each GPU's search used another.
    return replace(answers, objective=arguments["objective"], answers=plans)


def _fixed_recipe(request: Request, arguments: Mapping[str, Any]) -> Recipe | None:
    """Return the recipe that the user fixed for every GPU; None without one.

    The recipe of the user's configuration file is excluded, because a plan only starts from it.
    """
    from snugfit.techniques.recipe import Recipe

    named = arguments["recipe"] is not None or (not request.configuration and request.recipe != Recipe())
    return request.recipe if named else None


def _print(plans: GpuPlans, prices: Prices, arguments: Mapping[str, Any]) -> None:
    from snugfit.planning.fleet.prices import document
    from snugfit.report.plan.gpu_plans import render
    from snugfit.report.text.page import print_as

    form = "json" if arguments["as_json"] else arguments["form"]
    page = render(plans, prices, details=arguments["details"])
    print_as(form, {**plans.to_json(), "run": document(plans, prices)}, page, quiet=arguments["quiet"])


# ---- prices ------------------------------------------------------------------------------------------------

EXAMPLE = "Write lines such as `h200: 2.5`: the name of a GPU, and its price in USD per hour."


def _read_prices(file: Path | None, single: Sequence[str]) -> Prices:
    """Return the prices of GPUs in `file` (YAML or JSON), overridden by `NAME=PRICE` pairs.

    Raises `UsageError` and `GpuError` for an entry that is no price of a GPU of the table.
    """
    from snugfit.planning.fleet.prices import Prices

    known = Prices.of(_document(file).items(), str(file)) if file else Prices()
    return known.with_(Prices.of(map(_pair, single), "--price"))


def _document(file: Path) -> dict[Any, Any]:
    from snugfit.user_files import load_json, load_yaml, read_text

    text = read_text(file, noun="file of prices")
    document = (load_json if file.suffix.lower() == ".json" else load_yaml)(text, str(file))
    if not isinstance(document, dict) or not document:
        raise UsageError(f"{file}: no prices in this file. {EXAMPLE}")
    return document


def _pair(text: str) -> tuple[str, Any]:
    name, equals, price = text.rpartition("=")
    if not equals or not name.strip():
        raise UsageError(f"--price {text!r}: write NAME=PRICE, for example --price h200=2.5.")
    try:
        return name.strip(), float(price)
    except ValueError:
        # `Prices.of` raises the error for a price that is not a number.
        return name.strip(), price.strip()
