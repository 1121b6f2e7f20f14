"""The arguments that several commands share, each with its help, written once.

`about_a_job` gives a command all those that ask about a job, in front of its own. typer reads a command's
arguments from its signature, so that is what is put together: nothing is listed twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from snugfit.cli.request import Request
    from snugfit.exchange.account import Reading

JOB, HOW, WHERE = "The job", "How it is done", "Where it must fit"

Model = Annotated[
    str | None,
    typer.Argument(
        help="A preset (bert-large-uncased), a folder, a config.json, or a hub id.", show_default=False
    ),
]
Task = Annotated[
    str | None, typer.Option(help="sequence-classification, causal-lm, seq2seq-lm, ...", rich_help_panel=JOB)
]
SequenceLength = Annotated[
    int | None, typer.Option(help="Tokens of one sequence. [512]", rich_help_panel=JOB)
]
TargetLength = Annotated[
    int | None, typer.Option(help="Tokens of one target, for models with a decoder of their own. [128]",
                             rich_help_panel=JOB)
]  # fmt: skip
Padding = Annotated[
    float | None, typer.Option(help="Fraction of each sequence that is padding. [0]", rich_help_panel=JOB)
]
BatchSize = Annotated[
    int | None, typer.Option(help="Samples of one optimizer step, all micro-batches together. [4]",
                             rich_help_panel=JOB)
]  # fmt: skip
Labels = Annotated[
    int | None, typer.Option(help="Classes of a classification head. [2]", rich_help_panel=JOB)
]
Clip = Annotated[
    float | None, typer.Option(help="Largest gradient norm. \\[no clipping]", rich_help_panel=JOB)
]
Phase = Annotated[str | None, typer.Option(help="train or evaluate. \\[train]", rich_help_panel=JOB)]
JobFile = Annotated[
    Path | None, typer.Option("--job", help="A YAML file with these arguments.", rich_help_panel=JOB)
]
ArgumentsFile = Annotated[
    Path | None,
    typer.Option(
        "--arguments",
        help="TrainingArguments (JSON, YAML, .py), an accelerate, DeepSpeed or axolotl config to start from.",
        rich_help_panel=JOB,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one key of the job file; repeatable.",
                 rich_help_panel=JOB),
]  # fmt: skip
Online = Annotated[
    bool, typer.Option("--online", help="May fetch a configuration from the hub.", rich_help_panel=JOB)
]
RecipeText = Annotated[
    str | None,
    typer.Option("--recipe", help='Techniques: "bf16 + every_layer + micro_batches(4)". \\[plain]',
                 rich_help_panel=HOW),
]  # fmt: skip
Loop = Annotated[
    str | None, typer.Option(help="plain, accelerate or trainer. \\[plain]", rich_help_panel=HOW)
]
GpuName = Annotated[
    str | None, typer.Option("--gpu", help="h200, v100-16gb, 'rtx 4090'; snugfit gpus lists them.",
                             rich_help_panel=WHERE)
]  # fmt: skip
Memory = Annotated[
    str | None, typer.Option(help="Memory that may be used: 24GiB, 16GB, 16000MiB.", rich_help_panel=WHERE)
]
Format = Annotated[Literal["terminal", "markdown", "json"], typer.Option("--format", help="What to print.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Ask again, also when the answer is remembered.")]


def _job_arguments(
    model: Model = None,
    *,
    task: Task = None,
    sequence_length: SequenceLength = None,
    target_length: TargetLength = None,
    padding: Padding = None,
    batch_size: BatchSize = None,
    labels: Labels = None,
    clip: Clip = None,
    phase: Phase = None,
    job_file: JobFile = None,
    arguments_file: ArgumentsFile = None,
    settings: Settings = None,
    online: Online = False,
    recipe: RecipeText = None,
    loop: Loop = None,
    gpu: GpuName = None,
) -> None:
    """What every question about a job may say, in the order of its help."""


def about_a_job(command: Callable[..., int]) -> Callable[..., int]:
    """The command with the arguments of a job in front of its own. It is called with its own, and with the
    `Request` that all of them make as its first."""
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    def asked(**given: Any) -> int:
        return command(read_request(given), **{each.name: given[each.name] for each in own})

    asked.__name__, asked.__doc__ = command.__name__, command.__doc__
    asked.__signature__ = inspect.Signature([*job_parameters(), *own])  # type: ignore[attr-defined]
    return asked


def job_parameters(*, without: Collection[str] = ()) -> list[inspect.Parameter]:
    """The arguments of a question about a job, in the order of its help."""
    shared = inspect.signature(_job_arguments, eval_str=True).parameters.values()
    return [each for each in shared if each.name not in without]


def read_request(given: Mapping[str, Any]) -> Request:
    """The request that these arguments make; what became of the user's own configuration is told."""
    from snugfit.cli.request import Request

    request = Request.read(given)
    if request.reading:
        _tell(request.reading)
    return request


def _tell(reading: Reading) -> None:
    """What became of the user's own configuration, on stderr: stdout is for the answer."""
    from snugfit.report.configuration import render_reading
    from snugfit.report.text.terminal import as_text

    typer.echo(as_text(render_reading(reading)), err=True)
