"""`snugfit lengths`: memory and speed by a dataset's lengths, and the best padding.

Exit code 3 when the longest batch does not fit, for use in scripts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from snugfit.cli import arguments as given
from snugfit.cli.request import Request
from snugfit.errors import NothingFits, UsageError

if TYPE_CHECKING:
    from snugfit.planning.lengths.length_plan import LengthPlan
    from snugfit.planning.plan import Plan

File = Annotated[
    Path,
    given.option(
        given.JOB,
        "File with the number of tokens of each sample: .txt, .csv, .tsv, .jsonl, or .json (a list or a "
        "histogram).",
        "--lengths",
    ),
]
Planned = Annotated[
    Path | None,
    given.option(
        given.JOB,
        "File with the number of tokens of each sample. Plans for the longest, and recommends a padding.",
        "--lengths",
    ),
]
Column = Annotated[str | None, given.option(given.JOB, "Column or key with the lengths. \\[length]")]
Truncate = Annotated[
    int | None,
    given.option(
        given.JOB,
        "Also predict what cutting sequences at N tokens would give. This changes the job.",
        metavar="TOKENS",
        min=1,
    ),
]


@given.about_a_job
def lengths(
    request: Request,
    *,
    lengths: File,
    column: Column = None,
    truncate: Truncate = None,
    memory: given.Memory = None,
    headroom: given.Headroom = None,
    fresh: given.Fresh = False,
    form: given.Format = "terminal",
    as_json: given.AsJson = False,
) -> int:
    """Show a dataset's longest batch, its mean speed, and the best padding."""
    from snugfit.report.plan.lengths import render
    from snugfit.report.text.page import print_as

    if request.gpu is None:
        raise UsageError("Ways to pad are compared by their seconds, which need a GPU. Add --gpu NAME.")
    if request.software != "installed":
        raise UsageError(
            "Lengths are predicted for the installed software only. Leave the software profile out."
        )
    plan = plan_of(request, str(request.recipe), loop=request.loop, cut=truncate, fresh=fresh)
    plan = replace(plan, doubts=(*plan.doubts, *request.doubts))
    print_as("json" if as_json else form, plan.to_json(), render(plan))
    return 0 if plan.best or not plan.ways else NothingFits.exit_code


def plan_of(
    request: Request, recipe: str, *, loop: str = "plain", cut: int | None = None, fresh: bool = False
) -> LengthPlan:
    """Return the answer to a request with lengths and a GPU under this recipe, cached like a plan."""
    from snugfit.cli.plan_cache import answer
    from snugfit.planning.lengths.length_plan import LengthPlan
    from snugfit.planning.lengths.lengths import plan_lengths

    assert request.lengths is not None
    assert request.gpu is not None
    gpu, of = request.gpu, request.lengths
    asked: dict[str, Any] = {
        "memory_bytes": request.memory_bytes,
        "headroom": request.headroom,
        "loop": loop,
        "cut": cut,
    }
    return answer(
        LengthPlan.from_json,
        lambda tell: plan_lengths(request.job, recipe, lengths=of, gpu=gpu, tell=tell, **asked),
        request.job,
        gpu,
        fresh=fresh,
        first=f"predicting {request.job.model.name} at its lengths",
        what="lengths",
        of=of,
        recipe=recipe,
        **asked,
    )


def show_planned(request: Request, plan: Plan, form: str, *, fresh: bool) -> None:
    """Print the best recipe's result on all lengths below a plan for the longest batch.

    As JSON both are one document.
    """
    from snugfit.report.plan.lengths import render
    from snugfit.report.text.page import print_as

    if form != "json":
        typer.echo()
    padding = plan_of(request, plan.best_or_nearest.recipe, fresh=fresh)
    print_as(form, {**plan.to_json(), "lengths": padding.to_json()}, render(padding))
