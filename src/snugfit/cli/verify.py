"""`snugfit plan --verify K`: the plan's best recipes measured on the GPU here.

A request that cannot be verified is refused before any search: a search takes a minute.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from snugfit.errors import GpuError, OutsideBand
from snugfit.measurement.target import gpu_here

if TYPE_CHECKING:
    from collections.abc import Callable

    from snugfit.cli.request import Request
    from snugfit.evaluation.peers import Peers
    from snugfit.evaluation.predict_runs import PlannedRecipe
    from snugfit.planning.plan import Choice, Plan


def with_gpu_here(request: Request) -> Request:
    """Return the request for the GPU of this machine. Raises `GpuError` when there is none, or another was
    named.
    """
    from snugfit.job.gpu import find_gpu

    name = gpu_here()
    if name is None:
        raise GpuError(
            "--verify measures on this machine's GPU, but there is none. Leave it out, or run it on a "
            "machine with the GPU."
        )
    gpu = find_gpu(name)
    if request.gpu is not None and request.gpu.key != gpu.key:
        raise GpuError(
            f"--verify measures on this machine's GPU, a {gpu.name}, but the plan is for "
            f"{request.gpu.name}. Leave --gpu out, or --verify."
        )
    return replace(request, gpu=gpu)


def verify_plan(plan: Plan, form: str, *, peers: bool = True) -> None:
    """Measure the plan's listed recipes here, and print them below the plan; as JSON both are one document.

    With `peers`, the recipes of a user of the plain Trainer are measured too. Raises `OutsideBand` when a
    run's bytes differ from the prediction by more than `snugfit accuracy` allows.
    """
    from snugfit.cli.progress import show_progress
    from snugfit.evaluation.verify import verify
    from snugfit.report.plan.verify import document, render
    from snugfit.report.text.page import print_as

    assert plan.gpu is not None
    recipes = [planned_recipe(choice, plan.memory_bytes) for choice in plan.ranked]
    with show_progress(f"measuring {plan.job.model.name}") as tell:
        verified = verify(plan.job, plan.gpu.name, recipes, versions=plan.versions, tell=tell)
        if peers and plan.ranked:
            verified = replace(verified, peers=_measure_peers(plan, tell))
    if form == "markdown":
        typer.echo()
    print_as(form, document(plan, verified), render(verified))
    if verified.outside:
        raise OutsideBand(
            f"{len(verified.outside)} of {len(verified.runs)} runs are outside the band. The table "
            "marks them."
        )


def _measure_peers(plan: Plan, tell: Callable[[str], None]) -> Peers:
    """Measure the plain Trainer on the plan's job, and return the results."""
    from snugfit.evaluation.peers import measure_peers
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.technique import Slot

    assert plan.gpu is not None
    kept_slots = {Slot(slot.slot) for slot in plan.kept}
    chosen = Recipe.parse(plan.ranked[0].recipe)
    return measure_peers(
        plan.job, plan.gpu, chosen, kept_slots=kept_slots, memory_bytes=plan.memory_bytes, tell=tell
    )


def planned_recipe(choice: Choice, memory_bytes: int | None = None) -> PlannedRecipe:
    """Return a plan's choice as the prediction of a run."""
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


def usual_workers() -> int:
    """Return the number of processes that predict while the GPU is measured.

    More would crowd the host while steps are timed.
    """
    return min(4, os.cpu_count() or 1)
