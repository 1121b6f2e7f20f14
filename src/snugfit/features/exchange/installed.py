"""Argument names of the installed transformers, read from its source without importing it."""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import MISSING, fields
from enum import Enum
from functools import cache
from typing import Any, get_type_hints

from snugfit.deferred_imports import defer_imports
from snugfit.hub_kernels import no_hub_kernels
from snugfit.job.architectures import source, transformers_version
from snugfit.job.own_checkpointing import NAMES

CHECKPOINTING, OLD_CHECKPOINTING = NAMES


NAMES_ONLY: ContextVar[bool] = ContextVar("NAMES_ONLY", default=False)
"""True if the process only reads the names and defaults of argument classes, and then exits."""


def defer_rare_imports() -> None:
    """Defer imports of rare modules, before a class of arguments imports far more than its names need."""
    if NAMES_ONLY.get():
        defer_imports()


@cache
def defaults() -> dict[str, Any]:
    """Return the fields of the installed `TrainingArguments` with their default values."""
    defer_rare_imports()
    with no_hub_kernels():
        from transformers import TrainingArguments

    arguments: dict[str, Any] = {}
    for field in fields(TrainingArguments):
        value = field.default
        if value is MISSING:
            value = field.default_factory() if field.default_factory is not MISSING else None
        arguments[field.name] = value.value if isinstance(value, Enum) else value
    return arguments


@cache
def hints() -> dict[str, Any]:
    """Return the fields of the installed `TrainingArguments` with their types."""
    names = defaults()
    from transformers import TrainingArguments

    arguments = get_type_hints(TrainingArguments)
    return {name: arguments[name] for name in names}


def version() -> str:
    """Return the name and version of the installed transformers, for messages and exported files."""
    return f"transformers {transformers_version()}"


def checkpointing_name() -> str:
    """Return the argument that turns on activation checkpointing in the installed transformers."""
    # Importing the class takes seconds, so its source is parsed.
    fields = source("training_args.py")
    return CHECKPOINTING if f"\n    {CHECKPOINTING}: " in fields else OLD_CHECKPOINTING


@cache
def checkpointing_options() -> frozenset[str]:
    """Return the installed transformers' checkpointing options that torch's own checkpoint function does not
    have.

    They are read from the source of transformers, because an import of the class takes seconds. A cached plan
    takes less.
    """
    method = re.search(rf"def {checkpointing_name()}_enable\(([^)]*)\)", source("modeling_utils.py"))
    return frozenset(re.findall(r"\w+", method[1] if method else "")) & {"every_n_layers", "offload"}
