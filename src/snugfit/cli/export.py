"""`snugfit export`: a recipe as files that transformers, accelerate or plain torch run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from snugfit.cli import arguments as given
from snugfit.errors import UsageError

Recipe = Annotated[str, typer.Argument(help='Techniques: "bf16 + every_layer + micro_batches(4)", or plain.')]
Target = Annotated[
    Literal["hf", "accelerate", "torch"],
    typer.Option(
        "--to",
        help="hf: TrainingArguments. accelerate: a loop with accelerate and its config. torch: a plain "
        "PyTorch loop.",
    ),
]
Output = Annotated[Path | None, typer.Option(help="Write the files into this folder. \\[print them]")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]


def export(
    recipe: Recipe,
    model: given.Model = None,
    *,
    to: Target,
    task: given.Task = None,
    sequence_length: given.SequenceLength = None,
    target_length: given.TargetLength = None,
    batch_size: given.BatchSize = None,
    labels: given.Labels = None,
    clip: given.Clip = None,
    job_file: given.JobFile = None,
    settings: given.Settings = None,
    online: given.Online = False,
    offline: given.Offline = False,
    output: Output = None,
    force: Force = False,
    as_json: given.AsJson = False,
) -> int:
    """Write a recipe for transformers' Trainer, accelerate, or plain torch."""
    from snugfit.cli.request import Request
    from snugfit.exchange.export import export as write
    from snugfit.report.text.terminal import show_json

    flags: dict[str, Any] = {
        "model": model, "task": task, "sequence_length": sequence_length, "target_length": target_length,
        "batch_size": batch_size, "labels": labels, "clip": clip, "job_file": job_file,
        "settings": settings, "online": online, "offline": offline, "recipe": recipe,
    }  # fmt: skip
    if output is None and force:
        raise UsageError("--force overwrites files in the folder of --output, but --output is missing.")
    request = Request.read(flags)
    exported = write(request.job, request.recipe, to)
    if output is not None:
        from snugfit.report.text.files import write_new

        files = {output / name: text for name, text in exported.files.items()}
        write_new(files, force=force)
        for path in files:
            typer.echo(f"Written: {path}", err=True)
    if as_json:
        show_json(exported.to_json())
    elif output is None:
        typer.echo("\n".join(f"# ---- {name}\n{text}" for name, text in exported.files.items()), nl=False)
    return 0
