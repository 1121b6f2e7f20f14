"""The command `snugfit lengths`: memory and speed of a dataset's sequence lengths, and the best padding.

The exit code is 3 when the longest batch does not fit into memory, for use in scripts.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from snugfit.cli import arguments as given
from snugfit.cli.request import Request
from snugfit.errors import NothingFits, SnugfitError, UsageError

if TYPE_CHECKING:
    from snugfit.features.lengths.dataset import Lengths
    from snugfit.features.lengths.length_plan import LengthPlan

File = Annotated[
    Path,
    given.option(
        given.JOB,
        "File with the number of tokens of each sample: .txt, .csv, .tsv, .jsonl, or .json (a list or a "
        "histogram).",
        "--lengths",
    ),
]
PLANNED = inspect.Parameter(
    "lengths",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        given.option(
            given.JOB,
            "File with the number of tokens of each sample. Plans for the longest, and recommends a padding.",
            "--lengths",
        ),
    ],
)
"""The option `--lengths` of `snugfit plan`, as a parameter of the command."""

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
    """Print the memory of a dataset's longest batch, its mean step time, and the best padding."""
    from snugfit.features.lengths.report import render
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
    """Return the memory and speed of each way of padding for the requested job and GPU, cached like a
    plan.
    """
    from snugfit.cli.plan_cache import answer
    from snugfit.features.lengths.length_plan import LengthPlan
    from snugfit.features.lengths.search import plan_lengths

    assert request.gpu is not None
    gpu, of = request.gpu, read_lengths(request.flags["lengths"], request.flags.get("column"))
    arguments: dict[str, Any] = {
        "memory_bytes": request.memory_bytes,
        "headroom": request.headroom,
        "loop": loop,
        "cut": cut,
    }
    return answer(
        LengthPlan.from_json,
        lambda tell: plan_lengths(request.job, recipe, lengths=of, gpu=gpu, tell=tell, **arguments),
        request.job,
        gpu,
        fresh=fresh,
        first=f"predicting {request.job.model.name} at its lengths",
        what="lengths",
        of=of,
        recipe=recipe,
        **arguments,
    )


def read_lengths(path: Path, column: str | None) -> Lengths:
    """Return the sequence lengths in the file of the option `--lengths`."""
    from snugfit.features.lengths.dataset import Lengths

    return Lengths.read(path, column=column)


def settings_of(flags: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sequence length and the padding of the longest batch as job settings. Raises `UsageError`
    for a flag that contradicts them, and for a task without sequences.
    """
    from snugfit.job.inputs import has_sequence

    for key in ("sequence_length", "padding"):
        if flags.get(key) is not None:
            option = f"--{key.replace('_', '-')}"
            raise UsageError(f"{option} {flags[key]}: the file of --lengths gives it already. Leave it out.")
    task = settings.get("task") or _task_of(settings.get("model"))
    if task and not has_sequence(task):
        raise UsageError(f"--lengths: the task {task} has no sequences. Leave --lengths out.")
    lengths = read_lengths(flags["lengths"], flags.get("column"))
    lengths = lengths.cut(flags["truncate"]) if flags.get("truncate") else lengths
    return {"sequence_length": lengths.longest, "padding": 1 - lengths.mean / lengths.longest}


def _task_of(model: str | None) -> str | None:
    """Return the training task of a model's architecture; None if the config is not available on this
    machine.
    """
    from snugfit.job.model import Model

    # Errors about the model are raised later, by the request.
    with contextlib.suppress(SnugfitError):
        return Model.find(model, online=False).task if model else None
    return None


def refuse_others(flags: Mapping[str, Any], gpus: int) -> None:
    """Raise `UsageError` for options that `plan --lengths` does not support: measurements, and several
    GPUs.
    """
    if flags.get("gpus") is not None or gpus != 1:
        raise UsageError("A plan with --gpus does not take --lengths. Leave it out.")
    if flags.get("verify"):
        raise UsageError("--lengths and --verify cannot be used together. Give one of them.")
