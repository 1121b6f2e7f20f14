"""`snugfit plan --verify K`: the plan's best recipes measured on the GPU here, and what is learned from that.

What cannot be verified is said before anything is searched: a search takes a minute.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from snugfit.cli.here import gpu_here
from snugfit.errors import GpuError, OutsideBand, SnugfitError

if TYPE_CHECKING:
    from collections.abc import Callable

    from snugfit.cli.request import Request
    from snugfit.evaluation.predict_runs import PlannedRecipe
    from snugfit.evaluation.verify import Verification
    from snugfit.planning.plan import Choice, Plan

MOST_WORKERS = 4


def with_gpu_here(request: Request) -> Request:
    """The request for the GPU of this machine. Raises `GpuError` when there is none, or another was named."""
    from snugfit.job.gpu import find_gpu

    here = gpu_here()
    if here is None:
        raise GpuError(
            "--verify measures on the GPU of this machine, and there is none here. Leave it out for a plan "
            "alone, or run it where the GPU is."
        )
    gpu = find_gpu(here)
    if request.gpu is not None and request.gpu.key != gpu.key:
        raise GpuError(
            f"--verify measures on the GPU of this machine, a {gpu.name}; the plan was asked for "
            f"{request.gpu.name}. Leave --gpu out, or leave --verify out."
        )
    return replace(request, gpu=gpu)


def verified(plan: Plan, *, learn: bool, workers: int | None = None) -> Verification:
    """The plan's listed recipes measured here; the calibration learns from it, unless told otherwise."""
    from snugfit.cli.progress import telling
    from snugfit.evaluation.verify import verify

    assert plan.gpu is not None
    recipes = [foreseen(choice, plan.memory_bytes) for choice in plan.ranked]
    with telling() as tell:
        found = verify(plan.job, plan.gpu.name, recipes, versions=plan.versions, tell=tell)
        return (
            _learned(plan, found, workers or min(MOST_WORKERS, os.cpu_count() or 1), tell) if learn else found
        )


def _learned(plan: Plan, found: Verification, workers: int, tell: Callable[[str], None]) -> Verification:
    """With what the calibration took in. What was measured is shown even where nothing can be learned."""
    from snugfit.cli.remember import remember
    from snugfit.evaluation.learn import learn, nothing

    assert plan.gpu is not None
    try:
        what = remember(learn(found.runs, plan.gpu, workers=workers, tell=tell), found.runs, plan.gpu)
    except SnugfitError as failure:
        what = nothing(str(failure))
    return replace(found, learned=what)


def foreseen(choice: Choice, memory_bytes: int | None = None) -> PlannedRecipe:
    """A plan's choice as a run is foreseen."""
    from snugfit.evaluation.predict_runs import PlannedRecipe
    from snugfit.results.footprint import Footprint
    from snugfit.techniques.recipe import Recipe

    footprint = Footprint(
        requested_bytes=choice.requested_bytes,
        allocated_bytes=choice.allocated_bytes,
        reserved_bytes=choice.reserved_bytes,
        nvml_bytes=choice.needed_bytes,
        context_bytes=choice.context_bytes,
    )
    return PlannedRecipe(
        recipe=Recipe.parse(choice.recipe),
        footprint=footprint,
        step_seconds=choice.step_seconds,
        fits=memory_bytes is None or choice.needed_bytes <= memory_bytes,
    )


def show_verified(plan: Plan, found: Verification, form: str) -> None:
    """Prints it below the plan; as JSON both are one document. Raises `OutsideBand` when a run's bytes part
    from what was foreseen by more than `snugfit accuracy` allows."""
    from snugfit.report.plan.verify import document, render
    from snugfit.report.text.page import print_as

    if form == "markdown":
        typer.echo()
    print_as(form, document(plan, found), render(found))
    if found.outside:
        raise OutsideBand(f"{len(found.outside)} of {len(found.runs)} runs are outside the band.")
