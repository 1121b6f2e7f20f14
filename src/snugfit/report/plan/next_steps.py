"""Next steps after a plan: commands and calls with its best recipe, also those of features."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING

from snugfit.errors import SnugfitError
from snugfit.feature_folders import plugin_words
from snugfit.job.inputs import unused_sizes
from snugfit.step.applier import refuse_unsupported
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.registry import hooks, public_names

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.planning.plan import Plan
    from snugfit.techniques.feature import Configuration

OPTION_FIELDS = (
    "batch_size", "sequence_length", "target_length", "images", "seconds", "padding", "labels", "clip",
)  # fmt: skip
"""Names of the job's fields that commands accept as options of the same names."""

FILE_FIELDS = ("decay_groups", "build_on", "learning_rate")
"""Names of the job's fields that commands accept only as keys of a job file."""


def next_steps(plan: Plan, configuration: Configuration | None = None) -> Iterator[str]:
    """Yield commands and calls that use a plan's best recipe.

    None follow if nothing fits. A model that exists only in Python has none either: the user's own script
    trains it.
    """
    job = plan.job
    if plan.best is None or job.model.module is not None:
        return
    recipe = plan.best.recipe
    if not job.trains:
        yield f"Measure it: snugfit measure {job_words(job)} --recipe {shlex.quote(recipe)}"
        return
    train = f"snugfit train {job_words(job)} --recipe {shlex.quote(recipe)} --dataset DATA"
    steps = {"Train it": f"{train} --output-dir FOLDER"}
    # An existing Trainer may not support all techniques of this recipe.
    with suppress(SnugfitError):
        refuse_unsupported("fit", Recipe.parse(recipe).setup())
        if "fit" in public_names():
            steps["In a Trainer"] = f"snugfit.fit(trainer, {recipe!r}) before trainer.train()"
    for further in hooks("next_steps"):
        steps |= further(plan, configuration)
    yield from (f"{title}: {text}" for title, text in steps.items())


def job_words(job: Job) -> str:
    """Return the model and the job's other non-default values, as arguments of a command."""
    defaults = {field.name: field.default for field in fields(job)}
    unused = unused_sizes(job.task)
    words = [job.model.name, "--task", str(job.task)]
    for name in OPTION_FIELDS:
        if name not in unused and (value := getattr(job, name)) != defaults[name]:
            words += [f"--{name.replace('_', '-')}", str(value)]
    if job.dtype != (job.model.dtype or "float32"):
        words += ["--dtype", job.dtype]
    words += [] if job.trains else ["--phase", str(job.phase)]
    words += (job.added_phase or job.added_task).arguments(job)
    words += ["--vocab-size", str(job.model.vocabulary)] if job.model.resized else []
    for name in FILE_FIELDS:
        if (value := getattr(job, name)) != defaults[name]:
            words += ["--set", f"{name}={value}"]
    words += [word for plugin in plugin_words() for word in ("--plugin", plugin)]
    return shlex.join(words)
