"""The commands `snugfit check` and `snugfit export`, and the options `--arguments` and `--export` of other
commands.

`--arguments` takes a file with another library's training configuration. `check` ends with exit code 3 when
it finds a problem, for use in scripts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from snugfit.cli import arguments as given
from snugfit.errors import UsageError
from snugfit.frontends.one_of_several import OWN_PROCESS

if TYPE_CHECKING:
    from snugfit.features.exchange.export import Export
    from snugfit.job.job import Job
    from snugfit.planning.plan import Plan
    from snugfit.results.prediction import Prediction

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
File = Annotated[
    list[Path],
    typer.Argument(
        help="TrainingArguments (JSON, YAML, or a .py file that calls it), or a config of accelerate, "
        "DeepSpeed or axolotl. Can be repeated."
    ),
]
ArgumentsFile = Annotated[
    list[Path] | None,
    given.option(
        given.JOB,
        "Read your configuration: TrainingArguments or SFTConfig (JSON, YAML, .py), a shell script that "
        "starts training, a notebook, or a config of accelerate, DeepSpeed, axolotl or "
        "LLaMA-Factory. Repeat it for the files of a launcher.",
        "--arguments",
    ),
]
TRAINER_ARGUMENT = "--trainer-argument"
"""Hidden option that collects transformers' own arguments, as `key=value`."""
TrainerArguments = Annotated[list[str] | None, given.option(given.JOB, "", TRAINER_ARGUMENT, hidden=True)]
Output = Annotated[Path | None, typer.Option(help="Write the files into this folder. \\[print them]")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]


FOUND = 3


def _every_job(*, arguments_file: ArgumentsFile = None, trainer_arguments: TrainerArguments = None) -> None:
    """Declare, as parameters, the options of every command about a training job."""


def _one_answer(*, export: Into = None) -> None:
    """Declare, as a parameter, the option `--export` of commands that return one recipe."""


def options(command: str) -> list[inspect.Parameter]:
    """Return the options that this feature adds to the command, as parameters."""
    added: list[Callable[..., None]] = [] if command in ("export", "guide") else [_every_job]
    added += [_one_answer] if command in ("plan", "predict") else []
    return [one for owner in added for one in inspect.signature(owner, eval_str=True).parameters.values()]


def export(
    recipe: Recipe,
    *,
    to: Target,
    gpus: given.Gpus = None,
    mesh: given.Mesh = None,
    output: Output = None,
    force: Force = False,
    as_json: given.AsJson = False,
    **about_job: Any,
) -> int:
    """Write a recipe as files for transformers' Trainer, accelerate, torch, DeepSpeed, TRL, axolotl or
    LLaMA-Factory.
    """
    from snugfit.cli.request import Request
    from snugfit.features.exchange.export import export as write
    from snugfit.report.text.terminal import show_json
    from snugfit.user_files import writable_folder

    if output is None and force:
        raise UsageError("--force overwrites files in the folder of --output, but --output is missing.")
    if output is not None:
        writable_folder(output)
    request = Request.read({**about_job, "recipe": recipe, "gpus": gpus, "mesh": mesh})
    exported = write(request.job, request.recipe, to, request.gpus)
    if output is not None:
        files = {output / name: text for name, text in exported.files.items()}
        write_new(files, force=force)
        _print_written(exported, output)
    if as_json:
        show_json(exported.to_json())
    elif output is None:
        typer.echo("\n".join(f"# ---- {name}\n{text}" for name, text in exported.files.items()), nl=False)
    return 0


_RECIPE, *_OWN, _ = inspect.signature(export, eval_str=True).parameters.values()
_JOB = given.job_parameters("export", without=("padding", "phase", "recipe", "loop", "gpu"))
export.__signature__ = inspect.Signature([_RECIPE, *_JOB, *_OWN])  # type: ignore[attr-defined]


def check_export(command: str, flags: Mapping[str, Any], job: Job, gpus: int) -> None:
    """Raise `UsageError`, before long work begins, if the command's result cannot be exported.

    Causes are options that yield several recipes, an unsuitable target library, and a folder that cannot be
    written. A folder with files of the same names is also refused, unless they were exported for the same
    target.
    """
    if not flags.get("export"):
        return
    if flags.get("compare"):
        raise UsageError("--export writes one recipe. Leave --compare out.")
    if command == "plan" and (flags["gpus"] or gpus != 1):
        raise UsageError("A plan with --gpus does not take --export. Leave it out.")
    if flags.get("verify"):
        raise UsageError(
            "--export and --verify cannot be used together, because --verify may find another answer. "
            "Give one of them."
        )
    _check_folder(job, *flags["export"])


def _check_folder(job: Job, target: str, folder: Path) -> None:
    from snugfit.features.exchange.export import FILES, check_target
    from snugfit.user_files import writable_folder

    check_target(job, target)
    writable_folder(folder)
    existing = [folder / name for name in FILES[target] if (folder / name).exists()]
    # The first lines of an exported file name its target.
    head = existing[0].read_bytes()[:4000].decode(errors="replace") if existing else ""
    if existing and (existing[0].name != FILES[target][0] or f"(--export {target})" not in head):
        raise UsageError(
            f"{', '.join(map(str, existing))}: exists already and is not an export for {target}. "
            "Name another folder."
        )


def write_export(flags: Mapping[str, Any], answer: Plan | Prediction) -> None:
    """Write the recipe in a command's result to the folder, and for the library, of the option `--export`."""
    if not flags.get("export"):
        return
    from snugfit.features.exchange.export import export as write
    from snugfit.techniques.recipe import Recipe as Parsed

    # A plan has a best recipe or none. A prediction has one recipe and its number of GPUs.
    chosen: Any = getattr(answer, "best", answer)
    if answer.fits is False:
        typer.echo("Nothing was exported, because nothing fits.", err=True)
        return
    target, folder = flags["export"]
    exported = write(answer.job, Parsed.parse(str(chosen.recipe)), target, getattr(answer, "gpus", 1))
    # The folder may have changed since the check before the search.
    _check_folder(answer.job, target, folder)
    # Existing files come from an earlier export for this target (`_check_folder`).
    write_new({folder / name: text for name, text in exported.files.items()}, force=True)
    _print_written(exported, folder)


def _print_written(exported: Export, folder: Path) -> None:
    """Print on stderr the written files, and the differences between their training and the prediction."""
    for name in exported.files:
        given.say_written(folder / name)
    if exported.note:
        typer.echo(f"Note: {exported.note}", err=True)


def check(file: File, *, as_json: given.AsJson = False) -> int:
    """Report conflicts, settings without effect, and renamed keys in configuration files."""
    from snugfit.features.exchange.check import check as check_file
    from snugfit.features.exchange.check import render_check
    from snugfit.features.exchange.installed import NAMES_ONLY
    from snugfit.report.text.terminal import show, show_json

    # The argument classes import far more than a check needs.
    NAMES_ONLY.set(OWN_PROCESS.get())
    if as_json and len(file) > 1:
        raise UsageError(f"--json writes one document, but {len(file)} files are given. Give one file.")
    checked = [check_file(path) for path in file]
    for one in checked:
        show_json(one.to_json()) if as_json else show(render_check(one))
    return FOUND if any(one.findings for one in checked) else 0


def write_new(files: Mapping[Path, str], *, force: bool) -> None:
    """Write all files or none. Raises `UsageError` for a file that exists already, unless `force` is True."""
    from snugfit.report.text.files import make_folder, write_atomically

    existing = [str(path) for path in files if path.exists()]
    if existing and not force:
        raise UsageError(
            f"{', '.join(existing)}: already exists. Overwrite it with --force, or choose another name."
        )
    # All folders are created first, so that a failure leaves no file behind.
    for folder in {path.parent for path in files}:
        make_folder(folder)
    for path, text in files.items():
        write_atomically(path, text.encode("utf-8"))
