"""The command `snugfit example`, which `snugfit predict --example FILE.py` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from snugfit.cli import arguments as given
from snugfit.errors import NothingFits, UsageError

File = Annotated[Path, typer.Argument(help="Python file that defines example(batch_size, device).")]


def example(
    file: File,
    *,
    batch_size: given.BatchSize = None,
    gpu: given.GpuName = None,
    memory: given.Memory = None,
    details: given.Details = False,
    quiet: given.Quiet = False,
    as_json: given.AsJson = False,
) -> int:
    """Predict the memory of a training step of your own code. This executes the file."""
    from snugfit.features.examples.rehearsed import function_in, job_of
    from snugfit.prediction.predict import predict
    from snugfit.report import prediction as full
    from snugfit.report import short
    from snugfit.report.text.page import print_as
    from snugfit.report.text.terminal import show
    from snugfit.units import parse_bytes

    typer.echo(f"executing {file}", err=True)
    job = job_of(function_in(file), 4 if batch_size is None else batch_size, file.name)
    limit = parse_bytes(memory, quantity="memory") if memory is not None else None
    predicted = predict(job, gpu=gpu, memory_bytes=limit)
    if details and not (as_json or quiet):
        show(full.render(predicted))
    else:
        form = "json" if as_json else "terminal"
        print_as(form, predicted.to_json() if as_json else {}, short.render(predicted), quiet=quiet)
    return NothingFits.exit_code if predicted.fits is False else 0


OPTION = "--example"


def as_command(words: list[str]) -> list[str]:
    """Return the words of `predict --example FILE.py` as those of the command `example`. Raises `UsageError`
    for an option without a file, and for another command.
    """
    at = next((index for index, word in enumerate(words) if word.split("=")[0] == OPTION), None)
    if at is None:
        return words
    command, *_ = words
    if command != "predict":
        raise UsageError(f"snugfit {command} has no {OPTION}. Try snugfit predict {OPTION} FILE.py.")
    value = words[at].partition("=")[2]
    rest = words[at + 1 :] if value else words[at + 2 :]
    if not value and len(words) <= at + 1:
        raise UsageError(f"{OPTION} needs a Python file. Try snugfit predict {OPTION} FILE.py.")
    return ["example", value or words[at + 1], *words[1:at], *rest]
