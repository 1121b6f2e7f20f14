"""`snugfit export`, and `--export KIND DIR` of `plan` and `predict`: a recipe as files that others run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from snugfit.cli import arguments as given
from snugfit.errors import UsageError

if TYPE_CHECKING:
    from snugfit.exchange.export import Export
    from snugfit.job.job import Job

Recipe = Annotated[str, typer.Argument(help='Techniques: "bf16 + every_layer + micro_batches(4)", or plain.')]
Target = Annotated[
    Literal["hf", "accelerate", "torch", "deepspeed", "trl", "axolotl", "llamafactory"],
    typer.Option(
        "--to",
        help="hf: TrainingArguments. accelerate: a loop with accelerate and its config. torch: a plain "
        "PyTorch loop. deepspeed: a loop around its engine and its config. trl: a script for TRL. axolotl, "
        "llamafactory: their YAML files.",
    ),
]
Into = Annotated[
    tuple[str, Path] | None,
    typer.Option(
        "--export",
        metavar="KIND DIR",
        help="Write the answer into a folder, for hf, accelerate, torch, deepspeed, trl, axolotl or "
        "llamafactory.",
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
    dtype: given.Dtype = None,
    gpus: given.Gpus = None,
    mesh: given.Mesh = None,
    job_file: given.JobFile = None,
    settings: given.Settings = None,
    online: given.Online = False,
    offline: given.Offline = False,
    output: Output = None,
    force: Force = False,
    as_json: given.AsJson = False,
) -> int:
    """Write a recipe for transformers' Trainer, accelerate, torch, DeepSpeed, TRL, axolotl or
    LLaMA-Factory."""
    from snugfit.cli.request import Request
    from snugfit.exchange.export import export as write
    from snugfit.report.text.files import writable_folder, write_new
    from snugfit.report.text.terminal import show_json

    flags: dict[str, Any] = {
        "model": model, "task": task, "sequence_length": sequence_length, "target_length": target_length,
        "batch_size": batch_size, "labels": labels, "clip": clip, "dtype": dtype, "gpus": gpus,
        "job_file": job_file, "mesh": mesh,
        "settings": settings, "online": online, "offline": offline, "recipe": recipe,
    }  # fmt: skip
    if output is None and force:
        raise UsageError("--force overwrites files in the folder of --output, but --output is missing.")
    if output is not None:
        writable_folder(output)
    request = Request.read(flags)
    exported = write(request.job, request.recipe, to, request.gpus)
    if output is not None:
        files = {output / name: text for name, text in exported.files.items()}
        write_new(files, force=force)
        _tell(exported, output)
    if as_json:
        show_json(exported.to_json())
    elif output is None:
        typer.echo("\n".join(f"# ---- {name}\n{text}" for name, text in exported.files.items()), nl=False)
    return 0


def check_export(into: tuple[str, Path] | None, job: Job) -> None:
    """Raises `UsageError`, before long work begins, for a target that cannot train this job, and for a folder
    that cannot be written or has files by these names which were not exported for that target."""
    if into is None:
        return
    from snugfit.exchange.export import FILES, check_target
    from snugfit.report.text.files import writable_folder

    target, folder = into
    check_target(job, target)
    writable_folder(folder)
    existing = [folder / name for name in FILES[target] if (folder / name).exists()]
    head = existing[0].read_bytes()[:4000].decode(errors="replace") if existing else ""
    if existing and (existing[0].name != FILES[target][0] or f"(--export {target})" not in head):
        raise UsageError(
            f"{', '.join(map(str, existing))}: exists already and is not an export for {target}. "
            "Name another folder."
        )


def write_export(into: tuple[str, Path] | None, job: Job, recipe: str | None, gpus: int = 1) -> None:
    """Writes the answer's recipe where `--export` asks for it, for so many GPUs; None when there is no
    answer."""
    if into is None:
        return
    from snugfit.exchange.export import export as write
    from snugfit.report.text.files import write_new
    from snugfit.techniques.recipe import Recipe as Parsed

    if recipe is None:
        typer.echo("Nothing was exported, because nothing fits.", err=True)
        return
    target, folder = into
    exported = write(job, Parsed.parse(recipe), target, gpus)
    check_export(into, job)
    write_new({folder / name: text for name, text in exported.files.items()}, force=True)
    _tell(exported, folder)


def _tell(exported: Export, folder: Path) -> None:
    """Says on stderr what was written, and what is not quite as predicted."""
    for name in exported.files:
        given.say_written(folder / name)
    if exported.note:
        typer.echo(f"Note: {exported.note}", err=True)
