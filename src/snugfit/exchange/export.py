"""A job and a recipe as files that other libraries run.

    hf           training_arguments.py (a `TrainingArguments` call and the model), training_arguments.json
    accelerate   train.py (the loop on accelerate), accelerate_config.yaml
    torch        train.py (the loop, on torch and transformers alone)
    trl, axolotl, llamafactory   files of the tools that fine-tune language models (`finetuning_tools.py`)

The first three run as the loop of snugfit of that name (`trainer`, `accelerate`, `plain`), step for step.
What the Trainer is told comes from what each technique says of itself (`Technique.counterparts`); what the
scripts do comes from the Setup's wishes. A wish that a target cannot express is refused by the technique's
name, and nothing is written then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snugfit.errors import UsageError, did_you_mean
from snugfit.exchange import finetuning_tools
from snugfit.exchange.script import script_values, write_script
from snugfit.exchange.trainer_arguments import training_arguments
from snugfit.techniques.translate import write_arguments

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe

FILES = {
    "hf": ("training_arguments.py", "training_arguments.json"),
    "accelerate": ("train.py", "accelerate_config.yaml"),
    "torch": ("train.py",),
    "trl": ("sft.py",),
    "axolotl": ("axolotl.yaml",),
    "llamafactory": ("llamafactory.yaml",),
}
"""By target, the names of its files; the first says in its head who wrote it, and for which target."""

TARGETS = tuple(FILES)


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was written for a target."""

    to: str
    """The target, one of `TARGETS`."""

    files: Mapping[str, str]
    """Text by file name."""

    @property
    def note(self) -> str:
        """What is not quite as predicted when the target runs it; empty where nothing is."""
        return finetuning_tools.NOTES.get(self.to, "")

    def to_json(self) -> dict[str, Any]:
        """A JSON object, as the command prints it."""
        return {"schema": 1, "what": "export", "to": self.to, "files": dict(self.files)}


def check_target(job: Job, to: str) -> None:
    """Raises `UsageError` for a target that is unknown, or that cannot train this job in any recipe."""
    if to not in TARGETS:
        raise UsageError(f"Unknown target {to!r}.{did_you_mean(to, TARGETS)} Targets: {', '.join(TARGETS)}.")
    if not job.trains:
        raise UsageError("phase is evaluate, but an export is for training. Leave phase out.")
    if job.model.module is not None:
        raise UsageError(f"{job.model.name} exists only in Python, so a script could not build it.")
    if to in finetuning_tools.TOOLS:
        finetuning_tools.check_task(job, to)


def export(job: Job, recipe: Recipe, to: str) -> Export:
    """The files for a target. Raises `RecipeError` for what the target cannot express."""
    check_target(job, to)
    recipe.check(job, installed=False)
    if to in finetuning_tools.TOOLS:
        return Export(to=to, files={FILES[to][0]: finetuning_tools.TOOLS[to](job, recipe)})
    if to == "hf":
        return Export(to=to, files=_for_the_trainer(job, recipe))
    script = script_values(job, recipe, to, write_arguments(recipe)[0])
    files = {"train.py": write_script(to, script)}
    if to == "accelerate":
        files["accelerate_config.yaml"] = _launch_config(script["mixed"])
    return Export(to=to, files=files)


def _for_the_trainer(job: Job, recipe: Recipe) -> dict[str, str]:
    arguments = training_arguments(job, recipe)
    script = script_values(job, recipe, "hf", write_arguments(recipe)[0], training_arguments=arguments)
    return {
        "training_arguments.py": write_script("hf", script),
        "training_arguments.json": json.dumps(arguments, indent=2) + "\n",
    }


def _launch_config(mixed: str) -> str:
    """What `accelerate config` would write for one GPU."""
    import yaml

    config = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "NO",
        "downcast_bf16": "no",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": mixed,
        "num_machines": 1,
        "num_processes": 1,
        "use_cpu": False,
    }
    text: str = yaml.safe_dump(config, sort_keys=True)
    return text
