"""`snugfit lengths`: what a dataset's lengths mean for memory and speed, and how to pad.

Exit code 3 when the longest batch does not fit, so that a script can ask.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from snugfit.cli import arguments as given
from snugfit.cli.request import Request
from snugfit.errors import UsageError

if TYPE_CHECKING:
    from snugfit.planning.length_plan import LengthPlan

DOES_NOT_FIT = 3

File = Annotated[
    Path,
    typer.Option(
        "--lengths",
        help="Tokens of each sample: .txt (one a line), .csv, .tsv, .jsonl, .json (a list, or a histogram).",
        rich_help_panel=given.JOB,
    ),
]
Column = Annotated[
    str | None,
    typer.Option(help="The column or key that holds the lengths. \\[length]", rich_help_panel=given.JOB),
]
Truncate = Annotated[
    int | None,
    typer.Option(metavar="TOKENS", help="Also say what cutting longer sequences brings: another job.",
                 rich_help_panel=given.JOB),
]  # fmt: skip
Format = Annotated[Literal["terminal", "markdown", "json"], typer.Option("--format", help="What to print.")]


@given.about_a_job
def lengths(
    request: Request,
    *,
    lengths: File,
    column: Column = None,
    truncate: Truncate = None,
    memory: given.Memory = None,
    form: Format = "terminal",
    as_json: given.AsJson = False,
) -> int:
    """From a dataset's lengths: the longest batch, the mean speed, and how to pad."""
    if request.gpu is None:
        raise UsageError("Lengths are weighed in seconds, which need a GPU: add --gpu NAME.")
    if request.software != "installed":
        raise UsageError("Lengths are for the installed software. Leave the software profile out.")
    found = plan_of(request, truncate)
    show(found, "json" if as_json else form)
    return 0 if found.best or not found.ways else DOES_NOT_FIT


def plan_of(request: Request, truncate: int | None = None) -> LengthPlan:
    """The answer to a request with lengths and a GPU."""
    from snugfit.cli.progress import telling
    from snugfit.planning.lengths import plan_lengths

    assert request.lengths is not None
    assert request.gpu is not None
    with telling() as tell:
        return plan_lengths(
            request.job,
            request.recipe,
            lengths=request.lengths,
            gpu=request.gpu,
            memory_bytes=request.memory_bytes,
            loop=request.loop,
            cut=truncate,
            tell=tell,
        )


def show(found: LengthPlan, form: str) -> None:
    """Prints it."""
    from snugfit.report import lengths as report
    from snugfit.report import terminal

    if form == "json":
        terminal.show_json(found.to_json())
    elif form == "markdown":
        typer.echo(report.markdown(found), nl=False)
    else:
        terminal.show(report.render(found))
