"""Export of a training job and a recipe (its techniques) as files that other libraries run.

    hf           training_arguments.py (a `TrainingArguments` call and the model), training_arguments.json
    accelerate   train.py (the loop on accelerate), accelerate_config.yaml
    torch        train.py (the loop, on torch and transformers alone)
    deepspeed    train.py (the loop around DeepSpeed's engine), ds_config.json
    trl, axolotl, llamafactory   files of the tools that fine-tune language models (`finetuning_tools.py`)

The first four run the same steps as a loop of snugfit: `trainer`, `accelerate`, `plain`, and `plain` again.
The Trainer's arguments come from each technique (`Technique.counterparts`). The scripts are written from the
fields of the Setup. A field that a target cannot express raises an error with the technique's name, and no
file is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.documents import JsonDocument
from snugfit.errors import RecipeError, UsageError, did_you_mean
from snugfit.features.exchange import finetuning_tools
from snugfit.features.exchange.script import samples_at_once, script_values, write_script
from snugfit.features.exchange.trainer_arguments import (
    EACH_MEAN_ALIKE,
    MESH,
    ONE_LABEL,
    divides_by_labels,
    training_arguments,
    write_arguments,
)
from snugfit.job.inputs import AddedTask, ModelInputs, inputs_of
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe

FILES = {
    "hf": ("training_arguments.py", "training_arguments.json"),
    "accelerate": ("train.py", "accelerate_config.yaml"),
    "torch": ("train.py",),
    "deepspeed": ("train.py", "ds_config.json"),
    "trl": ("sft.py",),
    "axolotl": ("axolotl.yaml",),
    "llamafactory": ("llamafactory.yaml",),
}
"""Names of the exported files, by target. The first lines of the first file name snugfit and the target."""

TARGETS = tuple(FILES)


@dataclass(frozen=True, kw_only=True)
class Export(JsonDocument):
    """The files, such as scripts and configurations, that train with a recipe in another library (the
    target).
    """

    what: ClassVar = "export"

    to: str
    """The library that the files are for, one of `TARGETS`."""

    files: Mapping[str, str]
    """Text of each exported file, by file name."""

    note: str = ""
    """Difference between the prediction and a run by this library; empty for none."""


def check_target(job: Job, to: str) -> None:
    """Raise `UsageError` if the target library is unknown, or cannot train this job under any recipe."""
    if to not in TARGETS:
        raise UsageError(f"Unknown target {to!r}.{did_you_mean(to, TARGETS)} Targets: {', '.join(TARGETS)}.")
    if not job.trains:
        raise UsageError("phase is evaluate, but an export is for training. Leave phase out.")
    if job.added_task.is_objective:
        raise UsageError(
            f"The task {job.task} has a loss of its own, which no export writes. Train with snugfit "
            "train, or with TRL and snugfit.fit."
        )
    if job.model.module is not None:
        raise UsageError(
            f"{job.model.name} exists only in Python, so a script could not build it. Give a model by "
            "its name or folder."
        )
    if job.model.resized:
        raise UsageError(
            "The embeddings have other rows than those of the checkpoint, which an export does not change. "
            "Resize the checkpoint, and give its folder as the model."
        )
    if to in finetuning_tools.TOOLS:
        finetuning_tools.check_task(job, to)
    own_items = type(inputs_of(job.task, job.model.architecture)).label_items is not ModelInputs.label_items
    own_loss = type(job.added_task).finish is not AddedTask.finish
    # A script's loop weighs micro-batches by `labels`, and a Trainer needs a model that returns its loss.
    if own_loss if to == "hf" else own_items:
        remedy = "Use" if own_loss else "Export to hf, or use"
        raise UsageError(
            f"An export to {to} is not supported for {job.task}: its loss needs other code. "
            f"{remedy} snugfit train."
        )


def export(job: Job, recipe: Recipe, to: str, gpus: int = 1) -> Export:
    """Return the files with which another library (the target `to`) trains the job under the recipe.

    Raises `RecipeError` for a technique that the target cannot express. Raises `UsageError` for a number of
    GPUs that does not match the recipe or the batch.
    """
    check_target(job, to)
    # This call checks that the batch can be divided.
    samples_at_once(job, recipe, gpus)
    # The files may run on another machine, where the packages are installed.
    recipe.check(job, installed=False)
    if to in finetuning_tools.TOOLS:
        if gpus > 1:
            raise RecipeError(
                f"{recipe[Slot.SHARDING]} cannot be exported to {to}: its files were compared on one GPU "
                "only.\nExport to hf, accelerate or torch."
            )
        text = finetuning_tools.TOOLS[to](job, recipe)
        return Export(to=to, files={FILES[to][0]: text}, note=finetuning_tools.NOTES[to])
    if to == "hf":
        return _for_the_trainer(job, recipe, gpus)
    script = script_values(job, recipe, to, write_arguments(recipe)[0], gpus=gpus)
    files = {"train.py": write_script(to, script)}
    if to == "accelerate":
        files["accelerate_config.yaml"] = launch_config(script)
    if to == "deepspeed":
        files["ds_config.json"] = json.dumps(script["config"], indent=2) + "\n"
    return Export(to=to, files=files, note=script["note"])


def _for_the_trainer(job: Job, recipe: Recipe, gpus: int) -> Export:
    arguments = training_arguments(job, recipe, gpus=gpus)
    script = script_values(
        job, recipe, "hf", write_arguments(recipe)[0], training_arguments=arguments, gpus=gpus
    )
    if gpus > 1 and job.task not in ONE_LABEL and not divides_by_labels(job):
        script["note"] = ". ".join(filter(None, (script["note"], EACH_MEAN_ALIKE)))
    files = {"training_arguments.py": write_script("hf", script)}
    if MESH not in arguments:
        files["training_arguments.json"] = json.dumps(arguments, indent=2) + "\n"
    return Export(to="hf", files=files, note=script["note"])


def launch_config(script: Mapping[str, Any]) -> str:
    """Return the text of accelerate's YAML configuration for an exported script. `script` has the values of
    `script_values`.
    """
    import yaml

    config = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "NO",
        "downcast_bf16": "no",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": script["mixed"],
        "num_machines": 1,
        "num_processes": script["gpus"],
        "use_cpu": False,
    }
    parallel = script["parallel"]
    if parallel:
        config |= (
            _fsdp_settings(parallel)
            if parallel["weights"] == "sharded"
            else {"distributed_type": "MULTI_GPU"}
        )
    text: str = yaml.safe_dump(config, sort_keys=True)
    return text


def _fsdp_settings(parallel: Mapping[str, Any]) -> dict[str, Any]:
    """Return accelerate's FSDP2 settings, in which each layer is sharded as one unit.

    Several replicas of the shards need a mesh (accelerate's `ParallelismConfig`).
    """
    fsdp = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": ",".join(parallel["layers"]),
        "fsdp_reshard_after_forward": parallel["reshard"] != "none",
        "fsdp_offload_params": parallel["on_host"],
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    if "replicate" not in parallel["mesh"]:
        return {"distributed_type": "FSDP", "fsdp_config": fsdp}
    mesh = {f"parallelism_config_dp_{axis}_size": count for axis, count in parallel["mesh"].items()}
    return {"distributed_type": "FSDP", "fsdp_config": fsdp, "parallelism_config": mesh}
