"""`snugfit gpus`: the GPUs that can be predicted for; with a job, what each of them makes of it.

The two questions share a table and no option, so an option of the second without a job is a mistake. Exit
code 3 when none of the GPUs trains the job.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from snugfit.cli import arguments as given
from snugfit.cli.plan import Fidelity, Samples, Steps, Workers
from snugfit.errors import NothingFits, UsageError

if TYPE_CHECKING:
    from snugfit.cli.request import Request
    from snugfit.job.gpu import Gpu
    from snugfit.planning.fleet.gpu_plans import GpuPlans

MONEY = "What it costs"

Names = Annotated[
    list[str] | None,
    typer.Argument(help="Only these: h200, v100-16gb, 'rtx 4090'. One alone is shown with its sources."),
]
For = Annotated[
    str | None,
    typer.Option("--for", metavar="MODEL", help="Plan this model's job on each GPU. A preset, a folder, ...",
                 rich_help_panel=given.JOB),
]  # fmt: skip
Objective = Annotated[
    Literal["speed", "memory", "cost"],
    typer.Option(
        help="What is best on each GPU: the fastest that fits, the smallest, or the cheapest; and the order.",
        rich_help_panel=given.HOW,
    ),
]
PriceFile = Annotated[
    Path | None,
    typer.Option("--prices", help="YAML or JSON of USD an hour, by GPU.", rich_help_panel=MONEY),
]
Price = Annotated[
    list[str] | None,
    typer.Option("--price", metavar="NAME=USD", help="What an hour of one GPU costs; repeatable.",
                 rich_help_panel=MONEY),
]  # fmt: skip

_JOB = given.job_parameters(without=("model", "recipe", "loop", "gpu"))


def _asked(
    names: Names = None,
    for_model: For = None,
    *,
    fidelity: Fidelity = "rounds",
    objective: Objective = "speed",
    prices: PriceFile = None,
    price: Price = None,
    samples: Samples = None,
    steps: Steps = None,
    workers: Workers = None,
    fresh: given.Fresh = False,
    form: given.Format = "terminal",
    as_json: given.AsJson = False,
) -> None:
    """What the command may be asked, beside what a job is."""


def gpus(**asked: Any) -> int:
    """List the GPUs that snugfit knows, show one with its sources, or plan a job on each of them."""
    from snugfit.job.gpu import all_gpus, find_gpu

    named = [find_gpu(name) for name in asked["names"] or ()]
    found = list({gpu.key: gpu for gpu in named or all_gpus()}.values())
    if asked["for_model"] or asked["job_file"] or asked["arguments_file"]:
        return _plan(found, asked)
    _refuse_without_job(asked)
    _list(found, asked)
    return 0


_OWN = list(inspect.signature(_asked, eval_str=True).parameters.values())
gpus.__signature__ = inspect.Signature([*_OWN[:2], *_JOB, *_OWN[2:]])  # type: ignore[attr-defined]


def _refuse_without_job(asked: Mapping[str, Any]) -> None:
    listing = ("names", "form", "as_json")
    for each in (*_JOB, *_OWN):
        if each.name not in listing and asked[each.name] not in (each.default, None, [], ()):
            flag = each.name.replace("_", "-")
            raise UsageError(f"--{flag} is about a job, and none was named. Add --for MODEL and --task.")
    if asked["form"] == "markdown":
        raise UsageError("--format markdown is for plans. Add --for MODEL and --task, or leave it out.")


def _list(found: Sequence[Gpu], asked: Mapping[str, Any]) -> None:
    from snugfit.report.gpus import render, render_one
    from snugfit.report.text.terminal import show, show_json

    if asked["as_json"] or asked["form"] == "json":
        show_json({"schema": 1, "what": "gpus", "gpus": [gpu.to_json() for gpu in found]})
    else:
        show(render_one(found[0]) if len(found) == 1 else render(found))


# ---- the same plan on each ---------------------------------------------------------------------------------


def _plan(found: Sequence[Gpu], asked: Mapping[str, Any]) -> int:
    from snugfit.cli.prices import read_prices
    from snugfit.planning.fleet.prices import steps_of

    prices = read_prices(asked["prices"], asked["price"] or ())
    if asked["objective"] == "cost" and not prices.per_hour:
        raise UsageError("--objective cost needs prices: add --prices FILE, or --price h200=2.5 and so on.")
    job_arguments = {each.name: asked[each.name] for each in _JOB} | {"model": asked["for_model"]}
    request = given.read_request(job_arguments)
    _refuse(request)
    steps = steps_of(asked["samples"], asked["steps"], request.job.batch_size)
    answers = _answers(request, found, steps, asked)
    _print(answers, prices, "json" if asked["as_json"] else asked["form"])
    return 0 if answers.fitting else NothingFits.exit_code


def _refuse(request: Request) -> None:
    """What a job file may say, and this question has no use for."""
    from snugfit.techniques.recipe import Recipe

    if request.recipe != Recipe() and not request.reading:
        raise UsageError(f"recipe {str(request.recipe)!r}: a plan chooses the recipe itself. Leave it out.")
    if request.loop != "plain" and not request.reading:
        raise UsageError(f"loop {request.loop}: plans are made for the plain loop. Leave it out.")
    if request.gpu or request.memory_bytes:
        raise UsageError("gpu and memory have no place here: name the GPUs after `snugfit gpus`, or none.")


def _answers(request: Request, found: Sequence[Gpu], steps: int | None, asked: Mapping[str, Any]) -> GpuPlans:
    from snugfit.cli.plan_cache import key_of, recall, remember
    from snugfit.cli.progress import telling
    from snugfit.planning.fleet.gpu_plans import GpuPlans
    from snugfit.planning.fleet.search_gpus import plan_gpus

    wanted = asked["objective"]
    objective = "speed" if wanted == "cost" else wanted
    question = {"fidelity": asked["fidelity"], "objective": objective, "steps": steps}
    key = key_of(request.job, *found, what="gpus", **question)
    if key and not asked["fresh"] and (known := recall(key, GpuPlans.from_json)):
        return replace(known, objective=wanted)
    with telling() as tell:
        answers = plan_gpus(request.job, found, workers=asked["workers"], tell=tell, **question)
    if key:
        remember(key, answers)
    return replace(answers, objective=wanted)


def _print(found: GpuPlans, prices: Any, form: str) -> None:
    from snugfit.planning.fleet.prices import document
    from snugfit.report.plan.gpu_plans import render
    from snugfit.report.text.page import print_as

    print_as(form, {**found.to_json(), "run": document(found, prices)}, render(found, prices))
