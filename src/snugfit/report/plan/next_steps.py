"""What to do with a plan's answer: the line that trains, and the arguments of a Trainer."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from snugfit.errors import RecipeError, SnugfitError
from snugfit.exchange.export import export
from snugfit.exchange.trainer_arguments import training_arguments
from snugfit.job.limits import NO_SEQUENCE, WITH_TARGET
from snugfit.step.applier import refuse_unsupported
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.planning.plan import Plan

_TITLES = {"trl": "For TRL", "axolotl": "For axolotl", "llamafactory": "For LLaMA-Factory"}

BY_FLAG = ("batch_size", "sequence_length", "target_length", "labels", "clip")
"""Fields of a job that `snugfit train` and `snugfit export` take by flags of these names."""


def next_steps(plan: Plan, target: str = "") -> Iterator[str]:
    """The lines that put a plan's best recipe to use, with an export for the `target` whose file the user
    came with, else for the Trainer or torch; none where nothing fits, or where the model lives in Python,
    whose own script trains it, or is evaluated only."""
    job = plan.job
    if plan.best is None or job.model.module is not None or not job.trains:
        return
    about_job = _flags(job)
    recipe = shlex.quote(plan.best.recipe)
    yield f"Train it: snugfit train {about_job} --recipe {recipe} --dataset DATA --output-dir FOLDER"
    parsed = Recipe.parse(plan.best.recipe)
    in_trainer = False
    with suppress(SnugfitError):  # the Trainer has nothing that means it
        arguments = _changed_arguments(job, parsed)
        in_trainer = True
        yield f"In a Trainer: TrainingArguments({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
    if not in_trainer:
        with suppress(SnugfitError):  # it cannot be put into a Trainer that stands
            refuse_unsupported("fit", parsed.setup())
            yield f"In a Trainer: snugfit.fit(trainer, {plan.best.recipe!r}) before trainer.train()"
    for to in filter(None, (target, "hf", "torch")):
        with suppress(SnugfitError):  # this target cannot express it
            if to == "torch":
                refuse_unsupported("script", parsed.setup())
            if to != "hf":  # importing transformers to write a file that nobody reads would take seconds
                export(job, parsed, to)
            elif not in_trainer:
                continue
            title = _TITLES.get(to, "As a script")
            yield f"{title}: snugfit export {recipe} {about_job} --to {to} --output FOLDER"
            return


def _flags(job: Job) -> str:
    """The model and what differs from a job's defaults, as a command takes them."""
    defaults = {field.name: field.default for field in fields(job)}
    unused = {"sequence_length"} if job.task in NO_SEQUENCE else set()
    unused |= set() if job.task in WITH_TARGET else {"target_length"}
    words = [job.model.name, "--task", str(job.task)]
    for name in BY_FLAG:
        if name not in unused and (value := getattr(job, name)) != defaults[name]:
            words += [f"--{name.replace('_', '-')}", str(value)]
    if job.dtype != (job.model.dtype or "float32"):
        words += ["--dtype", job.dtype]
    return shlex.join(words)


def _changed_arguments(job: Job, recipe: Recipe) -> dict[str, Any]:
    """The arguments that differ from the plain recipe's, with the size of a batch. Raises `RecipeError` where
    they are not the whole recipe."""
    if (wish := recipe.setup().compile) is not None and wish.what == "layers":
        raise RecipeError(f"{recipe[Slot.ENGINE]} is a call of the model's layers, and no argument.")
    plain, arguments = training_arguments(job, Recipe()), training_arguments(job, recipe)
    return {
        name: value
        for name, value in arguments.items()
        if plain.get(name) != value or name == "per_device_train_batch_size"
    }
