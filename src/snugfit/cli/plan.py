"""The command `snugfit plan`: find the fastest recipe that fits, before a machine is rented.

Exit code 3 when no recipe fits, for use in scripts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from snugfit.cli import arguments as given
from snugfit.cli.request import Request, steps_of
from snugfit.errors import NothingFits, UsageError
from snugfit.planning.several_gpus import group_plans
from snugfit.techniques.registry import hooks

if TYPE_CHECKING:
    from snugfit.planning.plan import Plan

RUN = "The run"
NO_GPU = (
    "A plan compares seconds, which need a GPU. Add --gpu NAME; --memory can be added to it. To compare "
    "several cards: snugfit gpus NAME NAME --for MODEL"
)

Fidelity = Annotated[
    Literal["same", "rounds", "learns"],
    given.option(
        given.HOW,
        "Allowed differences in training: same (same sums), rounds (other rounding), learns (another "
        "algorithm).",
    ),
]
Objective = Annotated[
    Literal["speed", "memory", "cost"],
    given.option(
        given.HOW,
        "The aim: the fastest that fits (speed), the smallest (memory), or the cheapest (cost; on "
        "one GPU the fastest).",
    ),
]
Keep = Annotated[
    str | None,
    given.option(given.HOW, 'Techniques that the plan must use: "lora(r=16) + bf16_pure".', metavar="RECIPE"),
]
Free = Annotated[
    str | None,
    given.option(
        given.HOW,
        "Choices of your own configuration (slots) that the plan may change, such as optimizer,precision. "
        "\\[it keeps your adapters, precision and optimizer]",
        metavar="SLOTS",
    ),
]
Samples = Annotated[
    int | None, given.option(RUN, "Length of the run in samples. The start-up then counts too.", min=1)
]
Steps = Annotated[
    int | None, given.option(RUN, "Length of the run in steps. The start-up then counts too.", min=1)
]
Workers = Annotated[
    int | None, typer.Option(help="Number of processes that simulate in parallel. \\[2]", min=1, max=64)
]
All = Annotated[
    bool,
    typer.Option(
        "--all",
        help="Show all recipes of the Pareto front, and search slower ones too. \\[eight rows that "
        "differ by 3% or "
        "more, none five times slower than the answer]",
    ),
]
Gpus = Annotated[
    str | None,
    given.option(
        given.WHERE,
        "Number of GPUs that train together: 8; 2,4,8 to compare; or 1..64, powers of two. \\[1]",
        "--gpus",
        metavar="N",
    ),
]
Price = Annotated[
    float | None,
    given.option(given.WHERE, "With --gpus: USD of one GPU for an hour.", "--price", min=0.0),
]


@given.about_a_job
def plan(
    request: Request,
    *,
    gpus: Gpus = None,
    price: Price = None,
    routing: given.Routing = None,
    memory: given.Memory = None,
    headroom: given.Headroom = None,
    fidelity: Fidelity = "rounds",
    objective: Objective = "speed",
    keep: Keep = None,
    free: Free = None,
    samples: Samples = None,
    steps: Steps = None,
    workers: Workers = None,
    everything: All = False,
    fresh: given.Fresh = False,
    details: given.Details = False,
    quiet: given.Quiet = False,
    form: given.Format = "terminal",
    as_json: given.AsJson = False,
) -> int:
    """Find the fastest recipe that fits, without a GPU."""
    form = "json" if as_json else form
    if gpus is not None or request.gpus != 1:
        alone = {"samples": samples, "steps": steps, "all": everything, "objective": objective != "speed"}
        several: dict[str, Any] = {"gpus": gpus, "price": price, "fidelity": fidelity, "workers": workers}
        several |= {"fresh": fresh, "details": details, "form": form, "quiet": quiet}
        return int(group_plans().print_plan(request, several, alone))
    request = _check(request, price)
    arguments = {
        "fidelity": fidelity,
        "objective": objective,
        "keep": request.keep,
        "free": request.free,
        "steps": steps_of(samples, steps, request.job.batch_size),
        "ranked": request.ranked,
        "headroom": request.headroom,
        "whole_front": everything,
    }
    chosen = _plan(request, arguments, workers, fresh=fresh)
    given.hand_over(request.flags, chosen)
    follow_up = request.follow_up if chosen.fits else None
    if form != "json":
        _print(request, chosen, form, details=details, everything=everything, quiet=quiet)
    # JSON output is a single document, and `follow_up` prints it with the plan in it.
    if follow_up is None or form != "json":
        _print_further(request, chosen, form, fresh=fresh)
    if follow_up:
        follow_up(chosen, form)
    return 0 if chosen.fits else NothingFits.exit_code


def _print_further(request: Request, chosen: Plan, form: str, *, fresh: bool) -> None:
    """Print the results that features add to a plan that fits. For JSON, print the plan's document with these
    results as additional keys.
    """
    from snugfit.report.text.page import print_as
    from snugfit.report.text.terminal import show_json

    document = chosen.to_json()
    for add in hooks("add_to_plan") if chosen.fits else ():
        for key, result in add(request, chosen, fresh=fresh).items():
            document[key] = result.to_json()
            if form != "json":
                from snugfit.report.show import render

                typer.echo()
                print_as(form, document[key], render(result))
    if form == "json":
        show_json(document)


def _print(
    request: Request, chosen: Plan, form: given.Format, *, details: bool, everything: bool, quiet: bool
) -> None:
    """Print a plan's short report, or its whole report for `details` and `everything`."""
    from snugfit.report.plan import plan as report
    from snugfit.report.plan import short
    from snugfit.report.text.page import print_as

    own = request.configuration
    if details or everything:
        page = report.render(chosen, everything=everything, configuration=own)
    else:
        page = short.render(chosen, configuration=own)
    print_as(form, chosen.to_json(), page, quiet=quiet)


def _check(request: Request, price: float | None) -> Request:
    """Return the command's request if a plan can use it. Raises `UsageError` for options that a plan does not
    take, before long work begins.
    """
    if price is not None:
        raise UsageError(
            "--price is for plans with --gpus. `snugfit gpus --for MODEL --prices` compares GPUs."
        )
    from snugfit.job.gpu import common_card

    request.refuse_recipe_and_loop()
    if request.software != "installed":
        raise UsageError("A plan is for the installed software only. Leave the software profile out.")
    if request.gpu is None and request.memory_bytes and (card := common_card(request.memory_bytes)):
        typer.echo(
            f"No GPU was named: {card.name} is taken, a common card of this memory. --gpu chooses.", err=True
        )
        request = replace(request, gpu=card, memory_bytes=None)
    if request.gpu is None:
        raise UsageError(NO_GPU)
    return request


def _plan(request: Request, arguments: dict[str, Any], workers: int | None, *, fresh: bool) -> Plan:
    """Return the plan, from the cache or from a search. If no recipe fits, it has changes with which one
    would.
    """
    from snugfit.cli.plan_cache import plan as remembered

    chosen = remembered(
        request.job,
        fresh=fresh,
        gpu=request.gpu,
        memory_bytes=request.memory_bytes,
        workers=workers,
        start=request.recipe if request.configuration else None,
        **arguments,
    )
    chosen = replace(chosen, doubts=(*chosen.doubts, *request.doubts))
    for changes in hooks("changes_that_fit"):
        chosen = changes().with_ways_out_of_plan(request, chosen)
    return chosen
