"""The arguments that `predict` and `measure` share, each with its help, written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
Clip = Annotated[float | None, typer.Option(help="Largest gradient norm. [no clipping]", rich_help_panel=JOB)]
Phase = Annotated[str | None, typer.Option(help="train or evaluate. [train]", rich_help_panel=JOB)]
JobFile = Annotated[
    Path | None, typer.Option("--job", help="A YAML file with these arguments.", rich_help_panel=JOB)
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
    typer.Option("--recipe", help='Techniques: "bf16 + every_layer + micro_batches(4)". [plain]',
                 rich_help_panel=HOW),
]  # fmt: skip
Loop = Annotated[str | None, typer.Option(help="plain, accelerate or trainer. [plain]", rich_help_panel=HOW)]
GpuName = Annotated[
    str | None, typer.Option("--gpu", help="h200, v100-16gb, 'rtx 4090'; snugfit gpus lists them.",
                             rich_help_panel=WHERE)
]  # fmt: skip
Memory = Annotated[
    str | None, typer.Option(help="Memory that may be used: 24GiB, 16GB, 16000MiB.", rich_help_panel=WHERE)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
