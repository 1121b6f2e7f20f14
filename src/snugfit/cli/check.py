"""`snugfit check`: what in a configuration conflicts, does nothing, or was renamed, with a diff that cures
it.

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
Output = Annotated[
    Path | None, typer.Option(help="Write the changes as a unified diff into this .diff or .patch file.")
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")]


def check(file: File, *, output: Output = None, force: Force = False, as_json: given.AsJson = False) -> int:
    """Say what in a configuration file conflicts, does nothing, or was renamed."""
    from snugfit.exchange.check import check as check_file
    from snugfit.exchange.correct import difference
    from snugfit.report.configuration import render_check
    from snugfit.report.text.terminal import show, show_json

    if output is None and force:
        raise UsageError("--force overwrites the file of --output, but --output is missing.")
    if output is not None and output.suffix.lower() not in (".diff", ".patch"):
        raise UsageError(
            f"--output {output}: the file will be a unified diff, so its name must end in .diff or .patch."
        )
    checked = check_file(file)
    changes = difference(checked)
    if output is not None:
        from snugfit.report.text.files import write_new

        write_new({output: changes}, force=force)
        typer.echo(f"Written: {output}", err=True)
    if as_json:
        show_json(checked.to_json())
    else:
        show(render_check(checked, changes))
    return FOUND if checked.findings else 0
