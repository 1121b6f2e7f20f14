"""`snugfit plan`: the fastest recipe that fits, before the machine is rented.

Exit code 3 when nothing fits, so that a script can ask.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from snugfit.cli import arguments as given
from snugfit.cli import lengths as of_lengths
from snugfit.cli.request import Request
from snugfit.cli.verify import show_verified, verify_plan, with_gpu_here
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
Samples = Annotated[
    int | None, given.option(RUN, "Length of the run, in samples: start-up then counts too.", min=1)
]
Steps = Annotated[int | None, given.option(RUN, "Length of the run, in steps.", min=1)]
Workers = Annotated[
    int | None, typer.Option(help="Processes that simulate in parallel. \\[two]", min=1, max=64)
]
Plot = Annotated[
    Path | None, typer.Option(help="Draw memory against speed into this .png or .svg.", dir_okay=False)
]
Verify = Annotated[
    int | None,
    typer.Option(metavar="K", help="Measure the best K on the GPU here, and learn from it.", min=1, max=64),
]
NoLearn = Annotated[bool, typer.Option("--no-learn", help="With --verify: leave the calibration as it is.")]


@given.about_a_job
def plan(
    request: Request,
    *,
    memory: given.Memory = None,
    lengths: of_lengths.Planned = None,
    fidelity: Fidelity = "rounds",
    objective: Objective = "speed",
    samples: Samples = None,
    steps: Steps = None,
    workers: Workers = None,
    plot: Plot = None,
    fresh: given.Fresh = False,
    verify: Verify = None,
    no_learn: NoLearn = False,
    form: given.Format = "terminal",
    as_json: given.AsJson = False,
) -> int:
    """Find the fastest recipe that fits, without a GPU."""
    from snugfit.planning.fleet.prices import steps_of

    request = with_gpu_here(request) if verify else request
    _refuse(request, plot, verify)
    steps = steps_of(samples, steps, request.job.batch_size)
    asked = {"fidelity": fidelity, "objective": objective, "steps": steps, "ranked": verify or 0}
    chosen = _plan(request, asked, workers, fresh=fresh)
    if plot:
        from snugfit.report.plan.plot import draw
        from snugfit.report.text.files import write_atomically

        write_atomically(plot, draw(chosen, plot.suffix[1:]))
    form = "json" if as_json else form
    if lengths and chosen.best:
        of_lengths.show_planned(request, chosen, form, show_plan=_print, fresh=fresh)
    elif not verify or not chosen.fits or form != "json":
        _print(chosen, form)
    if verify and chosen.fits:
        show_verified(chosen, verify_plan(chosen, learn=not no_learn, workers=workers), form)
    return 0 if chosen.fits else NothingFits.exit_code


def _refuse(request: Request, plot: Path | None, verify: int | None) -> None:
    """Raises `UsageError` for what a plan does not take, before long work begins."""
    from snugfit.report.text.figure import check_plot_file

    request.refuse_recipe_and_loop()
    if request.software != "installed":
        raise UsageError("A plan is made for the installed software. Leave the software profile out.")
    if request.gpu is None:
        raise UsageError(
            "A plan needs seconds, and seconds need a GPU: add --gpu NAME; --memory may go with it."
        )
    if request.lengths and verify:
        raise UsageError("--lengths and --verify are two questions. Ask one at a time.")
    check_plot_file(plot)


def _plan(request: Request, asked: dict[str, Any], workers: int | None, *, fresh: bool) -> Plan:
    from snugfit.cli.plan_cache import answer, key_of
    from snugfit.planning.plan import Plan
    from snugfit.planning.search.search import plan as search

    start = request.recipe if request.reading else None
    key = key_of(request.job, request.gpu, memory=request.memory_bytes, start=str(start), **asked)
    how: dict[str, Any] = {
        "gpu": request.gpu,
        "memory_bytes": request.memory_bytes,
        "workers": workers,
        "start": start,
    }
    return answer(
        key, Plan.from_json, lambda tell: search(request.job, tell=tell, **how, **asked), fresh=fresh
    )


def _print(plan: Plan, form: str) -> None:
    from snugfit.report.plan.plan import render
    from snugfit.report.text.page import print_as

    print_as(form, plan.to_json(), render(plan))
