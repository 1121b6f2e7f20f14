"""The option `--no-ways-out`, which turns off the search for changes that fit after a prediction or a
plan.
"""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

NO_WAYS_OUT = inspect.Parameter(
    "no_ways_out",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, typer.Option("--no-ways-out", help="If it does not fit: do not search for changes that fit.")
    ],
)
