"""Checks of the arguments of a plan."""

from __future__ import annotations

import os

from snugfit.errors import UsageError, did_you_mean
from snugfit.job.job import Job, refuse_what_is_no_job
from snugfit.planning.plan import OBJECTIVES
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity


def refuse_bad_request(
    job: Job, *, objective: str = "speed", memory_bytes: int | None = None, workers: int | None = None
) -> None:
    """Raise `UsageError` for an invalid job, objective, memory limit or number of worker processes."""
    refuse_what_is_no_job(job)
    if objective not in OBJECTIVES:
        raise UsageError(
            f"Unknown objective {objective!r}.{did_you_mean(str(objective), OBJECTIVES)} "
            f"It is one of {', '.join(OBJECTIVES)}."
        )
    if memory_bytes is not None and not (type(memory_bytes) is int and memory_bytes > 0):
        raise UsageError(
            f"memory_bytes is {memory_bytes!r}; it must be a whole number of bytes above 0, or None."
        )
    if workers is not None and not (type(workers) is int and workers > 0):
        raise UsageError(f"workers is {workers!r}; it must be a whole number of processes from 1, or None.")


def refuse_non_callables(**given: object) -> None:
    """Raise `UsageError` if an argument is neither None nor a function."""
    for name, value in given.items():
        if value is not None and not callable(value):
            raise UsageError(f"{name} is {value!r}; it must be a function, or be left out.")


def fidelity_of(text: str | Fidelity) -> Fidelity:
    """Return the fidelity (numerical closeness to the plain step) with this name. Raises `UsageError` with
    the valid names."""
    legal = [degree.value for degree in Fidelity]
    if text not in legal:
        raise UsageError(
            f"Unknown fidelity {text!r}.{did_you_mean(str(text), legal)} It is one of {', '.join(legal)}."
        )
    return Fidelity(text)


def start_of(start: Recipe | str | None, ranked: int) -> Recipe | None:
    """Return the user's recipe `start`, parsed if it is text. Raises `UsageError` for any other value and for
    an invalid `ranked`."""
    if not (type(ranked) is int and ranked >= 0):
        raise UsageError(
            f"ranked is {ranked!r}; it must be a whole number from 0: how many of the best to list."
        )
    if start is None or isinstance(start, Recipe):
        return start
    if not isinstance(start, str):
        raise UsageError(f"start is {start!r}; it must be a recipe such as 'bf16 + every_layer', or None.")
    return Recipe.parse(start)


def workers_of(workers: int | None) -> int:
    """Return the number of worker processes of a search: `workers`, or by default two on several cores."""
    return min(2, os.cpu_count() or 1) if workers is None else workers
