"""`snugfit check`: what in a configuration conflicts, does nothing, or was renamed, each with its cure.

Exit code 3 when something was found, so that a script can ask.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from snugfit.cli import arguments as given

FOUND = 3

File = Annotated[
    Path,
    typer.Argument(
        help="TrainingArguments (JSON, YAML, or a .py file that calls it), or a config of accelerate, "
        "DeepSpeed or axolotl."
    ),
]


def check(file: File, *, as_json: given.AsJson = False) -> int:
    """Say what in a configuration file conflicts, does nothing, or was renamed."""
    from snugfit.exchange.check import check as check_file
    from snugfit.report.configuration import render_check
    from snugfit.report.text.terminal import show, show_json

    checked = check_file(file)
    if as_json:
        show_json(checked.to_json())
    else:
        show(render_check(checked))
    return FOUND if checked.findings else 0
