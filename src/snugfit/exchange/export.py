"""A job and a recipe as files that other libraries run.

    hf           training_arguments.py (a `TrainingArguments` call and the model), training_arguments.json
    accelerate   train.py (the loop on accelerate), accelerate_config.yaml
    torch        train.py (the loop, on torch and transformers alone)

Each runs as the loop of snugfit of that name does (`trainer`, `accelerate`, `plain`), step for step. What the
Trainer is told comes from what each technique says of itself (`Technique.counterparts`); what the scripts do
comes from the Setup's wishes. A wish that a target cannot express is refused by the technique's name, and
nothing is written then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snugfit.errors import RecipeError, UsageError, did_you_mean
from snugfit.exchange import installed
from snugfit.exchange.script import script_values, write_script
from snugfit.techniques.translate import write_arguments

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe

TARGETS = ("hf", "accelerate", "torch")
_ELSEWHERE = ("model", "lora", "environment")
"""Where dotted arguments are set that are no field of `TrainingArguments`."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was written for a target."""

    to: str
    """The target, one of `TARGETS`."""

    files: Mapping[str, str]
    """Text by file name."""

    def to_json(self) -> dict[str, Any]:
        """A JSON object, as the command prints it."""
        return {"schema": 1, "what": "export", "to": self.to, "files": dict(self.files)}


def export(job: Job, recipe: Recipe, to: str) -> Export:
    """The files for a target. Raises `RecipeError` for what the target cannot express."""
    if to not in TARGETS:
        raise UsageError(f"Unknown target {to!r}.{did_you_mean(to, TARGETS)} Targets: {', '.join(TARGETS)}.")
    if not job.trains:
        raise UsageError("phase is evaluate, but an export is for training. Leave phase out.")
    if job.model.module is not None:
        raise UsageError(f"{job.model.name} exists only in Python, so a script could not build it.")
    recipe.check(job, installed=False)
    if to == "hf":
        return Export(to=to, files=_for_the_trainer(job, recipe))
    script = script_values(job, recipe, write_arguments(recipe)[0])
    files = {"train.py": write_script(to, script)}
    if to == "accelerate":
        files["accelerate_config.yaml"] = _launch_config(script["mixed"])
    return Export(to=to, files=files)


def training_arguments(job: Job, recipe: Recipe) -> dict[str, Any]:
    """What the installed `TrainingArguments` takes. Raises `RecipeError` for what it cannot say."""
    dotted, unsaid = write_arguments(recipe)
    if unsaid:
        lines = [f"{technique}: TrainingArguments have no setting for it." for technique in unsaid]
        raise RecipeError(
            "\n".join(
                [
                    "This recipe cannot be exported to hf:",
                    *lines,
                    "Leave it out, or export to accelerate or torch, which can do more.",
                ]
            )
        )
    clip = {} if job.clip is None else {"max_grad_norm": job.clip}
    arguments: dict[str, Any] = {
        "output_dir": "trainer_output",
        "per_device_train_batch_size": job.batch_size // int(dotted["gradient_accumulation_steps"]),
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "constant",
        **clip,
    }
    for key, value in dotted.items():
        head, _, part = key.partition(".")
        if head in _ELSEWHERE:
            continue
        if part:
            arguments.setdefault(head, {})[part] = value
        else:
            arguments[head] = value
    return _as_installed(arguments)


def _as_installed(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same in the words of the installed version: checkpointing was renamed before 5.23, and learnt to
    leave layers out; arguments of an optimizer are one text."""
    if "optim_args" in arguments:
        parts = arguments["optim_args"]
        arguments["optim_args"] = ",".join(f"{name}={value}" for name, value in parts.items())
    new, name = installed.CHECKPOINTING, installed.checkpointing_name()
    options = arguments.get(f"{new}_kwargs", {})
    for option, idle in (("every_n_layers", 1), ("offload", False)):
        if options.get(option, idle) == idle:
            options.pop(option, None)
        elif option not in installed.checkpointing_options():
            raise RecipeError(
                f"{installed.version()} has no option {option} for checkpointing. Update it, or choose "
                "another checkpointing technique (snugfit techniques)."
            )
    if name != new:
        arguments = {key.replace(new, name): value for key, value in arguments.items()}
    return arguments


def _for_the_trainer(job: Job, recipe: Recipe) -> dict[str, str]:
    arguments = training_arguments(job, recipe)
    script = script_values(job, recipe, write_arguments(recipe)[0], training_arguments=arguments)
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
