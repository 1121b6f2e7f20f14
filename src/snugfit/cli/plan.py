"""`snugfit plan`: the fastest recipe that fits, before the machine is rented.

Exit code 3 when no recipe fits, for use in scripts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from snugfit.cli import arguments as given
from snugfit.cli import lengths as of_lengths
from snugfit.cli.request import Request, steps_of
from snugfit.cli.verify import verify_plan, with_gpu_here
from snugfit.cli.ways_out import with_ways_out_of_plan
from snugfit.errors import NothingFits, UsageError

if TYPE_CHECKING:
    from snugfit.planning.plan import Plan
    from snugfit.planning.several_gpus.plan import SeveralGpusPlan

RUN = "The run"

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
        "Slots of your own configuration that the plan may change, such as optimizer,precision. "
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
Verify = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        help="Measure the best K recipes on this machine's GPU.",
        min=1,
        max=64,
    ),
]
All = Annotated[
    bool,
    typer.Option(
        "--all",
        help="Show all rows of the front, and look for slower ones too. \\[eight rows that differ by 3% or "
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
NoPeers = Annotated[
    bool, typer.Option("--no-peers", help="With --verify: do not measure recipes of the plain Trainer.")
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
    open: given.Open = False,
    fresh: given.Fresh = False,
    verify: Verify = None,
    no_peers: NoPeers = False,
    no_ways_out: given.NoWaysOut = False,
    details: given.Details = False,
    quiet: given.Quiet = False,
    form: given.Format = "terminal",
    as_json: given.AsJson = False,
) -> int:
    """Find the fastest recipe that fits, without a GPU."""
    form = "json" if as_json else form
    if gpus is not None or request.gpus != 1:
        alone = {"verify": verify, "lengths": lengths, "plot": plot, "html": html, "open": open}
        alone |= {"samples": samples, "steps": steps, "all": everything, "objective": objective != "speed"}
        several = _plan_several(request, gpus, fidelity, workers, alone, fresh=fresh)
        several = replace(several, price_per_hour=price, doubts=(*several.doubts, *request.doubts))
        return _print_several(several, form, details=details, quiet=quiet)
    request = _check(request, verify, price)
    asked = {
        "fidelity": fidelity,
        "objective": objective,
        "keep": request.keep,
        "free": request.free,
        "steps": steps_of(samples, steps, request.job.batch_size),
        "ranked": verify or 0,
        "headroom": request.headroom,
        "whole_front": everything,
    }
    chosen = _plan(request, asked, workers, fresh=fresh, ways_out=not (no_ways_out or quiet))
    given.write_pictures(html, plot, chosen, open_page=open)
    more_follows = bool(chosen.fits and (lengths or verify))
    # JSON output is one document, which is then printed by what follows.
    if not more_follows or form != "json":
        _print(request, chosen, form, details=details, everything=everything, quiet=quiet)
    if more_follows:
        _follow_up(request, chosen, form, lengths=bool(lengths), peers=not no_peers, fresh=fresh)
    given.hand_over(request, chosen.job, chosen.best.recipe if chosen.best else None)
    return 0 if chosen.fits else NothingFits.exit_code


def _follow_up(
    request: Request, chosen: Plan, form: given.Format, *, lengths: bool, peers: bool, fresh: bool
) -> None:
    """Print the ways of padding for the best recipe, or measure the plan's best recipes here."""
    if lengths:
        of_lengths.show_planned(request, chosen, form, fresh=fresh)
    else:
        verify_plan(chosen, form, peers=peers)


def _print(
    request: Request, chosen: Plan, form: given.Format, *, details: bool, everything: bool, quiet: bool
) -> None:
    """Print the short answer, or the whole report for `details` and `everything`."""
    from snugfit.report.plan import plan as report
    from snugfit.report.plan import short
    from snugfit.report.text.page import print_as

    own = request.configuration
    if details or everything:
        page = report.render(chosen, everything=everything, configuration=own)
    else:
        page = short.render(chosen, configuration=own)
    print_as(form, chosen.to_json(), page, quiet=quiet)


def _check(request: Request, verify: int | None, price: float | None) -> Request:
    """Return the request, for the GPU of this machine where the plan is verified.

    Raises `UsageError` for options that a plan does not take, before long work begins.
    """
    if price is not None:
        raise UsageError(
            "--price is for plans with --gpus. `snugfit gpus --for MODEL --prices` compares GPUs."
        )
    from snugfit.job.gpu import common_card

    request = with_gpu_here(request) if verify else request
    request.refuse_recipe_and_loop()
    if request.software != "installed":
        raise UsageError("A plan is for the installed software only. Leave the software profile out.")
    if request.gpu is None and request.memory_bytes and (card := common_card(request.memory_bytes)):
        typer.echo(
            f"No GPU was named: {card.name} is taken, a common card of this memory. --gpu chooses.", err=True
        )
        request = replace(request, gpu=card, memory_bytes=None)
    if request.gpu is None:
        raise UsageError(
            "A plan compares seconds, which need a GPU. Add --gpu NAME; --memory can be added to it."
        )
    if request.lengths and verify:
        raise UsageError("--lengths and --verify cannot be used together. Give one of them.")
    return request


def _plan(
    request: Request, asked: dict[str, Any], workers: int | None, *, fresh: bool, ways_out: bool
) -> Plan:
    """Return the plan, from the cache or from a search; with `ways_out` where nothing fits."""
    from snugfit.cli.plan_cache import plan as remembered

    chosen = remembered(
        request.job,
        fresh=fresh,
        gpu=request.gpu,
        memory_bytes=request.memory_bytes,
        workers=workers,
        start=request.recipe if request.configuration else None,
        **asked,
    )
    chosen = replace(chosen, doubts=(*chosen.doubts, *request.doubts))
    return with_ways_out_of_plan(chosen, fresh=fresh) if ways_out else chosen


# ---- several GPUs that train together ----------------------------------------------------------------------

COUNTS = "Write a number (8), several (2,4,8), or a range of powers of two (1..64)."


def _check_several(request: Request, alone: Mapping[str, object]) -> None:
    """Raise `UsageError` for given options that only a plan for one GPU takes (`alone`), or that no plan
    takes.
    """
    if given_alone := [f"--{flag}" for flag, value in alone.items() if value]:
        raise UsageError(f"A plan with --gpus does not take {', '.join(given_alone)}. Leave it out.")
    request.refuse_recipe_and_loop()
    if request.software != "installed":
        raise UsageError("A plan is for the installed software only. Leave the software profile out.")
    if request.gpu is None:
        raise UsageError("A plan compares seconds, which need a GPU. Add --gpu NAME.")


def _plan_several(
    request: Request,
    counts: str | None,
    fidelity: str,
    workers: int | None,
    alone: Mapping[str, object],
    *,
    fresh: bool,
) -> SeveralGpusPlan:
    """Return the plan for the numbers of GPUs in `counts`, from the cache or from a search."""
    from snugfit.cli.plan_cache import answer
    from snugfit.planning.several_gpus.plan import SeveralGpusPlan
    from snugfit.planning.several_gpus.search import plan_several_gpus

    _check_several(request, alone)
    gpu = request.gpu
    assert gpu is not None
    asked: dict[str, Any] = {
        "gpus": read_counts(counts or str(request.gpus)),
        "memory_bytes": request.memory_bytes,
        "fidelity": fidelity,
        "keep": request.keep,
        "free": request.free,
        "headroom": request.headroom,
    }
    return answer(
        SeveralGpusPlan.from_json,
        lambda tell: plan_several_gpus(request.job, gpu=gpu, workers=workers, tell=tell, **asked),
        request.job,
        gpu,
        fresh=fresh,
        first=f"planning {request.job.model.name}",
        what="several gpus",
        **asked,
    )


def _print_several(several: SeveralGpusPlan, form: str, *, details: bool, quiet: bool) -> int:
    """Print the plan and return the exit code."""
    from snugfit.report.plan.several_gpus import render
    from snugfit.report.text.page import print_as

    print_as(form, several.to_json(), render(several, details=details), quiet=quiet)
    return 0 if several.fitting else NothingFits.exit_code


def read_counts(text: str) -> list[int]:
    """Parse the numbers of GPUs: `8`, `2,4,8` or `1..64`. Raises `UsageError`."""
    low, dots, high = text.partition("..")
    try:
        if not dots:
            return [int(part) for part in text.split(",")]
        first, last = int(low), int(high)
        powers = [first * 2**power for power in range(17) if first * 2**power <= last]
    except ValueError:
        powers, first = [], 0
    if first < 1 or not powers:
        raise UsageError(f"--gpus {text!r} is not a number of GPUs. {COUNTS}")
    return powers
