"""Command-line options of tasks on preferences, and the commands that support them."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

from snugfit.cli import arguments as given
from snugfit.errors import UsageError
from snugfit.features.preferences.settings import FORMS, LOSSES, REFERENCES

COMMANDS = ("predict", "plan", "gpus", "measure", "train")
"""Commands of snugfit that take jobs on preferences."""


def _option(name: str, kind: Any, sentence: str) -> inspect.Parameter:
    annotation = Annotated[kind, given.option(given.JOB, sentence)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


OPTIONS = (
    _option("completion_length", int | None, "with preferences: tokens of each answer. [half]"),
    _option("loss_type", str | None, f"with --task dpo: {', '.join(LOSSES)}. \\[sigmoid]"),
    _option("beta", float | None, "with preferences: weight of the loss's margin, as in TRL."),
    _option("gamma", float | None, "with --task simpo: margin of the loss. [0.5]"),
    _option("reference", str | None, f"with --task dpo or kto: {', '.join(REFERENCES)}. \\[auto]"),
)
"""Command-line options of the settings."""


def refuse_others(command: str, request: Any) -> None:
    """Raise `UsageError` for a command that does not support preferences, and for several GPUs."""
    task = request.job.task
    if task not in FORMS:
        return
    if command not in COMMANDS:
        raise UsageError(
            f"snugfit {command} does not support --task {task} yet. Commands: {', '.join(COMMANDS)}."
        )
    if request.gpus != 1:
        raise UsageError(f"--task {task} was tried on one GPU only. Leave --gpus and --mesh out.")
