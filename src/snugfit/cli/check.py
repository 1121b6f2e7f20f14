"""`snugfit check`: what in a configuration conflicts, does nothing, or was renamed, each with its cure.

Exit code 3 when something was found, so that a script can ask.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from snugfit.cli import arguments as given
from snugfit.errors import UsageError

FOUND = 3

File = Annotated[
    Path,
    typer.Argument(
        help="TrainingArguments (JSON, YAML, or a .py file that calls it), or a config of accelerate, "
        "DeepSpeed or axolotl."
    ),
]
Output = Annotated[Path | None, typer.Option(hidden=True)]
Force = Annotated[bool, typer.Option("--force", hidden=True)]


def check(file: File, *, output: Output = None, force: Force = False, as_json: given.AsJson = False) -> int:
    """Say what in a configuration file conflicts, does nothing, or was renamed."""
    from snugfit.exchange.check import check as check_file
    from snugfit.report.configuration import render_check
    from snugfit.report.text.terminal import show, show_json

    if output is not None or force:
        raise UsageError(
            "snugfit check writes no diff any more: its options --output and --force were removed. The table "
            "lists each cure; --json gives it as `fix`."
        )
    checked = check_file(file)
    if as_json:
        show_json(checked.to_json())
    else:
        show(render_check(checked))
    return FOUND if checked.findings else 0
