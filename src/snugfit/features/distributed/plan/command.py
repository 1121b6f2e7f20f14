"""Functions of the core's interface that make and print plans for several GPUs.

They serve `snugfit plan --gpus`, `snugfit gpus --gpus`, Python, and runs whose memory ran out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from snugfit.errors import NothingFits, UsageError

if TYPE_CHECKING:
    from snugfit.cli.request import Request
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.planning.fleet.prices import Prices
    from snugfit.techniques.recipe import Recipe

COUNTS = "Write a number (8), several (2,4,8), or a range of powers of two (1..64)."


def smaller_on_several(job: Job, recipe: Recipe, **asked: Any) -> Recipe | None:
    """Return a recipe that needs less memory, for a run on several GPUs that ran out of memory
    (`smaller.py`).
    """
    from snugfit.features.distributed.plan.smaller import smaller_on_several as search

    return search(job, recipe, **asked)


def print_plan(request: Request, asked: Mapping[str, Any], alone: Mapping[str, object]) -> int:
    """Print the plan for the requested numbers of GPUs, and return the exit code of `snugfit plan`.

    `alone` are the options that only a plan for one GPU takes.
    """
    from snugfit.cli.plan import NO_GPU
    from snugfit.features.distributed.plan import search
    from snugfit.features.distributed.plan.plan import SeveralGpusPlan
    from snugfit.features.distributed.plan.report import render
    from snugfit.report.text.page import print_as

    _refuse_alone(request, alone, "A plan with --gpus")
    if request.software != "installed":
        raise UsageError("A plan is for the installed software only. Leave the software profile out.")
    if request.gpu is None:
        raise UsageError(NO_GPU)
    plan = request.answer_of(
        lambda job, kinds, **rest: search.plan_several_gpus(job, gpu=kinds[0], **rest),
        SeveralGpusPlan,
        [request.gpu],
        asked,
        "several gpus",
        gpus=_counts(request, asked),
        memory_bytes=request.memory_bytes,
    )
    plan = replace(plan, price_per_hour=asked["price"], doubts=(*plan.doubts, *request.doubts))
    page = render(plan, details=asked["details"])
    print_as(asked["form"], plan.to_json(), page, quiet=asked["quiet"])
    return 0 if plan.fitting else NothingFits.exit_code


def print_cards(request: Request, gpus: Sequence[Gpu], prices: Prices, asked: Mapping[str, Any]) -> int:
    """Print the numbers of GPUs of each model that can train the job, and return the exit code of `snugfit
    gpus`.
    """
    from snugfit.cli.request import steps_of
    from snugfit.features.distributed.plan import search
    from snugfit.features.distributed.plan.cards_report import render
    from snugfit.features.distributed.plan.plan import CardPlans, document_of_cards
    from snugfit.report.text.page import print_as

    alone = {"objective memory": asked["objective"] == "memory"}
    _refuse_alone(request, alone, "`gpus` with --gpus")
    plans = request.answer_of(
        search.plan_cards,
        CardPlans,
        gpus,
        asked,
        "cards",
        gpus=_counts(request, asked),
    )
    plans = replace(
        plans,
        objective=asked["objective"],
        steps=steps_of(asked["samples"], asked["steps"], request.job.batch_size),
        doubts=(*plans.doubts, *request.doubts),
    )
    document = {**plans.to_json(), "run": document_of_cards(plans, prices)}
    form = "json" if asked["as_json"] else asked["form"]
    print_as(form, document, render(plans, prices), quiet=asked["quiet"])
    return 0 if plans.fitting else NothingFits.exit_code


def _refuse_alone(request: Request, alone: Mapping[str, object], what: str) -> None:
    """Raise `UsageError` for given options that a plan for several GPUs does not support."""
    if given_alone := [f"--{flag}" for flag, value in alone.items() if value]:
        raise UsageError(f"{what} does not take {', '.join(given_alone)}. Leave it out.")
    request.refuse_recipe_and_loop()


def _counts(request: Request, asked: Mapping[str, Any]) -> list[int]:
    return read_counts(asked["gpus"] or str(request.gpus))


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
