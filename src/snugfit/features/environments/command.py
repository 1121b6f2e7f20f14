"""The commands `snugfit run-in` and `snugfit upgrade-check`, and the option `--software FILE`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from snugfit.cli import arguments as given
from snugfit.cli.request import Request
from snugfit.errors import UsageError

_NAME = "a folder with a Python environment, an interpreter, or a requirements file"
Name = Annotated[str, typer.Argument(help=f"Environment: {_NAME}.", metavar="ENV")]
Line = Annotated[str, typer.Argument(help="Command line of snugfit as one word.", metavar="'COMMAND ...'")]
Install = Annotated[
    bool,
    typer.Option("--install", help="Create a missing environment for a file in the cache folder, with pip."),
]
To = Annotated[
    str, given.option(given.HOW, f"Environment after the upgrade: {_NAME}.", "--to", metavar="ENV")
]
From = Annotated[
    str | None,
    given.option(given.HOW, "Environment before the upgrade. \\[the present one]", "--from", metavar="ENV"),
]


def run_in(environment: Name, command: Line, *, install: Install = False) -> int:
    """Run a command with the packages of another Python environment."""
    from snugfit.features.environments.environment import find_environment
    from snugfit.features.environments.process import run_module

    selected = find_environment(environment, install=install)
    typer.echo(f"environment: {selected.python}", err=True)
    return run_module(selected, "snugfit", shlex.split(command))


@given.about_a_job
def upgrade_check(
    request: Request,
    *,
    to: To,
    from_env: From = None,
    install: Install = False,
    gpus: given.Gpus = None,
    memory: given.Memory = None,
    quiet: given.Quiet = False,
    as_json: given.AsJson = False,
) -> int:
    """Compare bytes, seconds, kernels and arguments of a job in two Python environments."""
    from snugfit.features.environments.changes import check_upgrade
    from snugfit.features.environments.report import render
    from snugfit.report.text.page import print_as

    check = check_upgrade(request, from_env, to, install=install)
    document = check.to_json() if as_json else {}
    print_as("json" if as_json else "terminal", document, render(check), quiet=quiet)
    return 0


COMMANDS = ("predict", "plan")
"""Commands that `--software FILE` runs in another environment."""

OPTION, INSTALL = "--software", "--install"


def as_command(words: list[str]) -> list[str]:
    """Return the words of a command with `--software FILE` as those of the command `run-in`.

    The name of a software profile stays with the command. Raises `UsageError` for a command that does not
    take an environment.
    """
    at = next((index for index, word in enumerate(words) if word.split("=")[0] == OPTION), None)
    if at is None:
        return words
    value, rest = words[at].partition("=")[2], words[at + 1 :]
    if not value and rest:
        value, *rest = rest
    if not _names_environment(value):
        return words
    if words[0] not in COMMANDS:
        raise UsageError(
            f"snugfit {words[0]} has no {OPTION}. Install snugfit there, or use snugfit predict."
        )
    line = [word for word in (*words[:at], *rest) if word != INSTALL]
    return ["run-in", value, shlex.join(line), *([INSTALL] if INSTALL in words else [])]


def _names_environment(value: str) -> bool:
    """Return True for a path, and False for the name of a software profile or a mistyped one."""
    from snugfit.feature_folders import feature_files

    profiles = {file.name.removesuffix(".json") for file in feature_files("software")}
    looks_like_path = "/" in value or "\\" in value or value.endswith((".txt", ".in")) or Path(value).exists()
    return bool(value) and value not in profiles and looks_like_path
