"""The command `snugfit schema`: the JSON Schema of `--json` documents."""

from __future__ import annotations

from typing import Annotated

import typer

Name = Annotated[
    str | None,
    typer.Argument(metavar="COMMAND", help="Command, such as predict or plan. Without one, all commands."),
]


def schema(command: Name = None) -> None:
    """Print the JSON Schema (draft 2020-12) of a command's `--json` document."""
    from snugfit.features.schema.json_schema import schema_of
    from snugfit.report.text.terminal import show_json

    show_json(schema_of(command))
