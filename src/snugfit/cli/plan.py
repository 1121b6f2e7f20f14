"""`snugfit plan`: the fastest recipe that fits, before the machine is rented.

Exit code 3 when nothing fits, so that a script can ask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from snugfit.cli import arguments as given
from snugfit.cli import lengths as of_lengths
from snugfit.cli.request import Request, steps_of
from snugfit.cli.verify import verify_plan, with_gpu_here
from snugfit.errors import NothingFits, UsageError

if TYPE_CHECKING:
    from snugfit.planning.plan import Plan

RUN = "The run"

Fidelity = Annotated[
    Literal["same", "rounds", "learns"], given.option(given.HOW, "The least exact that is allowed.")
]
Objective = Annotated[
    Literal["speed", "memory", "cost"],
    given.option(given.HOW, "The fastest that fits, the smallest, or the cheapest (on one GPU the fastest)."),
]
Keep = Annotated[
    str | None,
    given.option(given.HOW, 'Techniques that stay: "lora(r=16) + bf16_pure".', metavar="RECIPE"),
]
Free = Annotated[
    str | None,
    given.option(
        given.HOW,
        "Slots to look at although --arguments fills them: optimizer,precision. "
        "\\[adapters, precision and optimizer stay]",
        metavar="SLOTS",
    ),
]
Samples = Annotated[
    int | None, given.option(RUN, "Length of the run, in samples: start-up then counts too.", min=1)
]
Steps = Annotated[int | None, given.option(RUN, "Length of the run, in steps.", min=1)]
Workers = Annotated[
    int | None, typer.Option(help="Processes that simulate in parallel. \\[two]", min=1, max=64)
]
Verify = Annotated[
    int | None,
    typer.Option(metavar="K", help="Measure the best K on the GPU here, and learn from it.", min=1, max=64),
]
All = Annotated[
    bool, typer.Option("--all", help="Show the whole front; else eight rows that differ by 3% at least.")
]
NoLearn = Annotated[bool, typer.Option("--no-learn", help="With --verify: leave the calibration as it is.")]


@given.about_a_job
def plan(
    request: Request,
    *,
    routing: given.Routing = None,
    memory: given.Memory = None,
    headroom: given.Headroom = None,
    lengths: of_lengths.Planned = None,
    fidelity: Fidelity = "rounds",
    objective: Objective = "speed",
    keep: Keep = None,
    free: Free = None,
    samples: Samples = None,
    steps: Steps = None,
    workers: Workers = None,
    everything: All = False,
    plot: given.Plot = None,
    html: given.Html = None,
    fresh: given.Fresh = False,
    verify: Verify = None,
    no_learn: NoLearn = False,
    form: given.Format = "terminal",
    as_json: given.AsJson = False,
) -> int:
    """Find the fastest recipe that fits, without a GPU."""
    from snugfit.report.plan.plan import render
    from snugfit.report.text.page import print_as

    given.check_pictures(html, plot)
    request = _check(request, verify)
    steps = steps_of(samples, steps, request.job.batch_size)
    asked = {
        "fidelity": fidelity,
        "objective": objective,
        "keep": keep,
        "free": free or (),
        "steps": steps,
        "ranked": verify or 0,
        "headroom": headroom,
    }
    chosen = _plan(request, asked, workers, fresh=fresh)
    given.write_pictures(html, plot, chosen)
    form = "json" if as_json else form
    more_follows = chosen.fits and (lengths or verify)
    if not more_follows or form != "json":
        print_as(form, chosen.to_json(), render(chosen, everything=everything))
    if more_follows and lengths:
        of_lengths.show_planned(request, chosen, form, fresh=fresh)
    elif more_follows:
        verify_plan(chosen, form, learn=not no_learn, workers=workers)
    return 0 if chosen.fits else NothingFits.exit_code


def _check(request: Request, verify: int | None) -> Request:
    """The request, for the GPU of this machine where the plan is verified. Raises `UsageError` for what a
    plan does not take, before long work begins."""
    request = with_gpu_here(request) if verify else request
    request.refuse_recipe_and_loop()
    if request.software != "installed":
        raise UsageError("A plan is made for the installed software. Leave the software profile out.")
    if request.gpu is None:
        raise UsageError(
            "A plan needs seconds, and seconds need a GPU: add --gpu NAME; --memory may go with it."
        )
    if request.lengths and verify:
        raise UsageError("--lengths and --verify are two questions. Ask one at a time.")
    return request


def _plan(request: Request, asked: dict[str, Any], workers: int | None, *, fresh: bool) -> Plan:
    """The plan, remembered or searched for."""
    from snugfit.cli.plan_cache import plan as remembered

    return remembered(
        request.job,
        fresh=fresh,
        gpu=request.gpu,
        memory_bytes=request.memory_bytes,
        workers=workers,
        start=request.recipe if request.reading else None,
        **asked,
    )
