"""Further lines below a plan: its recipe as `TrainingArguments`, and as a command that exports it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from snugfit.errors import RecipeError, SnugfitError
from snugfit.features.exchange.export import export
from snugfit.features.exchange.trainer_arguments import training_arguments
from snugfit.report.plan.next_steps import job_words
from snugfit.step.applier import refuse_unsupported
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.job.job import Job

_TITLES = {"trl": "For TRL", "axolotl": "For axolotl", "llamafactory": "For LLaMA-Factory"}


def next_steps(job: Job, recipe: Recipe, target: str) -> Mapping[str, str]:
    """Return lines for a plan's report, by title: the recipe as Trainer arguments, and as an export command.

    The export command is for the library `target` of the user's own file, else for the Trainer or torch.
    """
    steps: dict[str, str] = {}
    with suppress(SnugfitError):  # the Trainer may have no equivalent
        arguments = ", ".join(f"{k}={v!r}" for k, v in _changed_arguments(job, recipe).items())
        steps["In a Trainer"] = f"TrainingArguments({arguments})"
    # An export has the loss of the model itself.
    targets = () if job.added_task.is_objective else (target, "hf", "torch")
    for to in filter(None, targets):
        with suppress(SnugfitError):  # this target may not support the recipe
            if to == "torch":
                refuse_unsupported("script", recipe.setup())
            if to != "hf":  # hf's would import transformers, and is not needed
                export(job, recipe, to)
            elif not steps:
                continue
            words = f"{shlex.quote(str(recipe))} {job_words(job)}"
            return steps | {
                _TITLES.get(to, "As a script"): f"snugfit export {words} --to {to} --output FOLDER"
            }
    return steps


def _changed_arguments(job: Job, recipe: Recipe) -> dict[str, Any]:
    """Return the Trainer arguments of a recipe that differ from those without any technique, and the batch
    size.

    Raises `RecipeError` if arguments alone cannot express the recipe.
    """
    if (wish := recipe.setup().lowering) is not None and not wish.is_one_program:
        raise RecipeError(
            f"{recipe[Slot.ENGINE]} is a call on the model's layers, for which there is no argument."
        )
    plain, arguments = training_arguments(job, Recipe()), training_arguments(job, recipe)
    return {
        name: value
        for name, value in arguments.items()
        if plain.get(name) != value or name == "per_device_train_batch_size"
    }
