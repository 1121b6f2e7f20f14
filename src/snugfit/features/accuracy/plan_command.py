"""The option `snugfit plan --verify K`: the plan's best recipes are measured on the GPU of this machine.

Options that exclude `--verify` are refused before the search for recipes, which takes a minute.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from snugfit.errors import GpuError, OutsideBand, UsageError
from snugfit.measurement.target import gpu_here

if TYPE_CHECKING:
    from collections.abc import Callable

    from snugfit.cli.request import Request
    from snugfit.features.accuracy.peers import Peers
    from snugfit.planning.plan import Plan


Verify = Annotated[
    int | None,
    typer.Option(metavar="K", help="Measure the best K recipes on this machine's GPU.", min=1, max=64),
]
NoPeers = Annotated[
    bool, typer.Option("--no-peers", help="With --verify: do not measure recipes of the plain Trainer.")
]


def _of_plan(*, verify: Verify = None, no_peers: NoPeers = False) -> None:
    """Declare, as parameters, the options that this feature adds to `snugfit plan`: `--verify` and
    `--no-peers`.
    """


def options() -> list[inspect.Parameter]:
    """Return the options of `snugfit plan` that this feature adds: `--verify` and `--no-peers`."""
    return list(inspect.signature(_of_plan, eval_str=True).parameters.values())


def prepare(request: Request) -> Request:
    """Return the plan's parsed options for the GPU of this machine, on which the best recipes are then
    measured.

    Raises `GpuError` without a GPU or for another one, and `UsageError` for options that exclude `--verify`.
    """
    from snugfit.job.gpu import find_gpu

    if request.flags["gpus"] is not None or request.gpus != 1:
        raise UsageError("A plan with --gpus does not take --verify. Leave it out.")
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
    follow_up = partial(verify_plan, peers=not request.flags["no_peers"])
    return replace(request, gpu=gpu, ranked=request.flags["verify"], follow_up=follow_up)


def verify_plan(plan: Plan, form: str, *, peers: bool = True) -> None:
    """Measure the plan's listed recipes on this machine, and print them below the plan. As JSON, plan and
    measurements are one document.

    With `peers`, the plain Trainer is measured too. Raises `OutsideBand` when a run's bytes differ from the
    prediction by more than `snugfit accuracy` allows.
    """
    from snugfit.cli.progress import show_progress
    from snugfit.features.accuracy.predict_runs import PlannedRecipe
    from snugfit.features.accuracy.verified_tables import document, render
    from snugfit.features.accuracy.verify import verify
    from snugfit.report.text.page import print_as

    assert plan.gpu is not None
    recipes = [PlannedRecipe.of(choice, plan.memory_bytes) for choice in plan.ranked]
    with show_progress(f"measuring {plan.job.model.name}") as tell:
        verified = verify(plan.job, plan.gpu.name, recipes, versions=plan.versions, tell=tell)
        if peers and plan.ranked:
            verified = replace(verified, peers=_measure_peers(plan, tell))
    if form == "markdown":
        typer.echo()
    print_as(form, document(plan, verified), render(verified))
    if verified.outside:
        raise OutsideBand(
            f"{len(verified.outside)} of {len(verified.runs)} runs have larger errors than allowed. "
            f"The table "
            "marks them."
        )


def _measure_peers(plan: Plan, tell: Callable[[str], None]) -> Peers:
    """Measure the plain Trainer on the plan's job, and return the results."""
    from snugfit.features.accuracy.peers import measure_peers
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.technique import Slot

    assert plan.gpu is not None
    kept_slots = {Slot(slot.slot) for slot in plan.kept}
    chosen = Recipe.parse(plan.ranked[0].recipe)
    return measure_peers(
        plan.job, plan.gpu, chosen, kept_slots=kept_slots, memory_bytes=plan.memory_bytes, tell=tell
    )


def command_to_verify(plan: Plan) -> dict[str, str]:
    """Return the command that measures the plan's best recipes, by its title.

    It is empty for a plan whose seconds rest on measured rates alone. Those of another GPU, or of another
    host that limits the step, are assumed. `--verify` takes no plan for several GPUs.
    """
    from snugfit.report.plan.next_steps import job_words

    timing, best = plan.timing, plan.best
    if timing is None or best is None or (timing.measured_rates and not plan.timed(best).assumption):
        return {}
    return {"Measure the best recipes on such a GPU": f"snugfit plan {job_words(plan.job)} --verify 3"}
