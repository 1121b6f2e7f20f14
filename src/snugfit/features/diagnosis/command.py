"""The command `snugfit why-oom`: it explains a run that ended out of memory, from its log or a memory
snapshot.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from snugfit.cli import arguments as given
from snugfit.errors import UsageError

if TYPE_CHECKING:
    from snugfit.cli.request import Request
    from snugfit.features.diagnosis.result import Diagnosis
    from snugfit.results.prediction import Prediction

LARGEST_INPUT = 256 << 20
"""Largest size of a log or snapshot that is read, in bytes."""

COMPRESSED = (b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
"""First bytes of compressed files: gzip, zip, bzip2, xz and zstd."""

Log = Annotated[
    str | None,
    typer.Argument(
        help="A log or an error's text, - for stdin, or a snapshot of torch.cuda.memory._dump_snapshot.",
        metavar="LOG|-",
        show_default=False,
    ),
]
For = Annotated[
    str | None,
    given.option(given.JOB, "Compare with a predicted step of this model.", "--for", metavar="MODEL"),
]

_JOB = given.job_parameters("why_oom", without=("model",))
_OF_FEATURES = given.job_options("why_oom")


def _arguments(
    log: Log = None,
    for_model: For = None,
    *,
    gpus: given.Gpus = None,
    mesh: given.Mesh = None,
    memory: given.Memory = None,
    as_json: given.AsJson = False,
) -> None:
    """Declare the options of `why-oom`, as parameters, in addition to those of a training job."""


def why_oom(**options: Any) -> int:
    """Explain a CUDA out-of-memory error, or a killed process, from its log or a memory snapshot."""
    from snugfit.features.diagnosis.diagnose import ON_GPU, diagnose

    request = _request(options)
    content, location = _content(options["log"])
    diagnosis, sizes = diagnose(content, location)
    prediction = None
    if request is not None and diagnosis.kind in ON_GPU:
        from snugfit.features.diagnosis.compare import compare

        diagnosis, prediction = compare(diagnosis, sizes, request)
    elif request is not None:
        note = "The job was not compared, because GPU memory was not short."
        diagnosis = replace(diagnosis, notes=(*diagnosis.notes, note))
    _print(diagnosis, prediction, as_json=options["as_json"])
    return 0


_OWN = list(inspect.signature(_arguments, eval_str=True).parameters.values())
why_oom.__signature__ = inspect.Signature([*_OWN[:2], *_JOB, *_OWN[2:]])  # type: ignore[attr-defined]


def _request(options: Mapping[str, Any]) -> Request | None:
    """Return the training job to compare with, parsed from the options; None if they name none. Raises
    `UsageError` for options that need a job.
    """
    if options["for_model"] or options["job_file"] or any(options[name] for name in _OF_FEATURES):
        about_job = {name: value for name, value in options.items() if name not in ("log", "for_model")}
        return given.read_request(about_job | {"model": options["for_model"]}, "why_oom")
    for parameter in (*_JOB, *_OWN):
        if parameter.name not in ("log", "as_json") and options[parameter.name] not in (
            parameter.default,
            [],
        ):
            raise UsageError(f"--{parameter.name.replace('_', '-')} needs a model. Add --for MODEL.")
    return None


def _content(log: str | None) -> tuple[bytes, str]:
    """Return the content of the log or snapshot, and its name for messages. Raises `UsageError` if it cannot
    be read.
    """
    from snugfit.user_files import refuse_no_file, refuse_unreadable

    hint = ' Cut out the error: grep -B 40 -A 5 -m 1 "out of memory" LOG | snugfit why-oom -'
    if log not in (None, "-"):
        path = Path(str(log))
        refuse_no_file(path, "log or snapshot", LARGEST_INPUT, hint)
        with refuse_unreadable(path):
            content = path.read_bytes()
        location = str(path)
    else:
        # `sys.stdin` is None if the shell closed it.
        if sys.stdin is None or (log is None and sys.stdin.isatty()):
            raise UsageError(
                "No log given. Name a file, or pipe one: snugfit why-oom LOG, or ... | snugfit why-oom -"
            )
        # One byte beyond the limit shows that the input is too long.
        content, location = sys.stdin.buffer.read(LARGEST_INPUT + 1), "stdin"
        if len(content) > LARGEST_INPUT:
            raise UsageError(f"stdin: more than {LARGEST_INPUT:,} bytes.{hint}")
    if not content.strip():
        raise UsageError(f"{location}: empty. Give the text of the error, with the lines before it.")
    if content.startswith(COMPRESSED):
        raise UsageError(f"{location}: a compressed file. Unpack it first, such as with gunzip.")
    return content, location


def _print(diagnosis: Diagnosis, prediction: Prediction | None, *, as_json: bool) -> None:
    from snugfit.report.text.terminal import show, show_json

    if as_json:
        show_json(diagnosis.to_json())
        return
    from snugfit.features.diagnosis.report import render
    from snugfit.report.plan.ways_out import of_prediction

    show(render(diagnosis, of_prediction(prediction) if prediction else []))
