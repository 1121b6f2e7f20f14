"""Conversion of a recipe to other libraries' arguments, and to the `TrainingArguments` of the installed
transformers.

No technique is named here: `Technique.counterparts` is the only source. `techniques/translate.py` reads the
same counterparts.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from snugfit.errors import RecipeError
from snugfit.features.exchange import installed
from snugfit.features.exchange.script import samples_at_once
from snugfit.job.architectures import class_of
from snugfit.step.checkpointing import layer_names
from snugfit.techniques.counterpart import Counterpart, Setting

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.technique import Technique

_ELSEWHERE = ("model", "layers", "functorch", "lora", "environment")
"""Prefixes of dotted arguments that become no fields of `TrainingArguments`."""


ONE_LABEL = (
    "sequence-classification", "image-classification", "audio-classification", "video-classification",
    "multiple-choice",
)  # fmt: skip
"""Tasks with one label per sample, so that all GPUs have equally many labels."""

MESH = "parallelism_config"
"""Argument for a device mesh. It is an object of accelerate, which a JSON file cannot contain."""


def training_arguments(job: Job, recipe: Recipe, to: str = "hf", gpus: int = 1) -> dict[str, Any]:
    """Return a recipe's arguments for the installed `TrainingArguments` on this number of GPUs, by name.

    Raises `RecipeError`, which names the target `to`, for a technique without such arguments.
    """
    dotted, unsaid = write_arguments(recipe)
    if unsaid:
        lines = [f"{technique}: {_why_unsaid(technique)}." for technique in unsaid]
        raise RecipeError(
            "\n".join(
                [
                    f"This recipe cannot be exported to {to}:",
                    *lines,
                    "Leave it out, or export to accelerate or torch, which can do more. snugfit train takes "
                    "it as it is.",
                ]
            )
        )
    clip = {} if job.clip is None else {"max_grad_norm": job.clip}
    arguments: dict[str, Any] = {
        "output_dir": "trainer_output",
        "per_device_train_batch_size": samples_at_once(job, recipe, gpus),
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "constant",
        **clip,
    }
    for key, value in dotted.items():
        head, _, part = key.partition(".")
        if head in _ELSEWHERE:
            continue
        if part and value is None:
            continue  # equal to the library's default
        if part:
            arguments.setdefault(head, {})[part] = value
        else:
            arguments[head] = value
    if gpus > 1:
        arguments |= _on_several(job, arguments)
    if MESH in arguments:
        copies = gpus // int(arguments[MESH]["dp_shard_size"])
        arguments[MESH] = {"dp_replicate_size": copies, **arguments[MESH]}
    return _as_installed(arguments)


EACH_MEAN_ALIKE = (
    "This model's loss is a mean that is not divided by the labels of the whole batch. The Trainer would "
    "count it once for each GPU, except with average_tokens_across_devices=False. The means of the GPUs "
    "then count alike, however many labels each has"
)
"""Comment about `average_tokens_across_devices=False`: `Trainer.compute_loss` multiplies the loss by the
number of processes unless it is False.
"""


def divides_by_labels(job: Job) -> bool:
    """Return True if the code of this job's model passes the whole batch's label count to its loss
    function.
    """
    model = class_of(job.task, job.transformers_config())
    # A model with transformers' `loss_function` takes `num_items_in_batch`, which the Trainer counts.
    return "loss_function(" in inspect.getsource(model.forward)


def _on_several(job: Job, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Trainer arguments to add or replace if several processes train."""
    more: dict[str, Any] = {}
    if "deepspeed" in arguments:  # one process has no communication to overlap
        section = arguments["deepspeed"]["zero_optimization"] | {"overlap_comm": True}
        more["deepspeed"] = arguments["deepspeed"] | {"zero_optimization": section}
    if job.task in ONE_LABEL or not divides_by_labels(job):
        more["average_tokens_across_devices"] = False
    if "fsdp_config" in arguments:  # accelerate's default, `_no_split_modules`, includes BERT's embeddings
        more["fsdp_config"] = arguments["fsdp_config"] | {
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": [*layer_names(job)],
        }
        if arguments["fsdp_config"]["cpu_offload"]:  # gradients are on the host, and so is their norm
            more["ddp_backend"] = "cpu:gloo,cuda:nccl"
    return more


def _why_unsaid(technique: Technique) -> str:
    """Return the reason why no `TrainingArguments` express this technique: there are none, or their meaning
    differs.
    """
    notes = [counterpart.note for counterpart in technique.counterparts]
    return notes[0] if notes and all(notes) else "TrainingArguments have no setting for it"


def _as_installed(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the Trainer's arguments under the names of the installed transformers.

    Checkpointing was renamed before 5.23, and its new options can leave out layers. Arguments of an optimizer
    are joined to one text.
    """
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


# ---- arguments of any library --------------------------------------------------------------------------


def write_arguments(recipe: Recipe) -> tuple[dict[str, Any], tuple[Technique, ...]]:
    """Return another library's arguments for a recipe by dotted name, and the techniques without such
    arguments."""
    arguments: dict[str, Any] = {}
    unwritten = []
    for technique in recipe:
        for counterpart in technique.counterparts:
            # A counterpart with a note behaves differently, so it is read and never written.
            is_written = not counterpart.note and counterpart.used != "to read"
            if is_written and (own := _arguments_for(counterpart, technique)) is not None:
                arguments |= own
                break
        else:
            unwritten.append(technique)
    return arguments, tuple(unwritten)


def _arguments_for(counterpart: Counterpart, technique: Technique) -> dict[str, Any] | None:
    """Return another library's arguments for this technique with its settings; None if it has no argument for
    a setting.
    """
    named = {value.name for value in _flat(counterpart.arguments) if isinstance(value, Setting)}
    for declared in fields(technique):
        value = getattr(technique, declared.name)
        implied = counterpart.settings.get(declared.name, declared.default)
        # The technique has another value of this setting than the arguments imply.
        if declared.name not in named and value != implied:
            return None
    return {key: _with_settings(value, technique) for key, value in counterpart.arguments.items()}


def _flat(arguments: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the values in nested mappings, such as arguments in named groups."""
    for value in arguments.values():
        yield from _flat(value) if isinstance(value, Mapping) else (value,)


def _with_settings(value: Any, technique: Technique) -> Any:
    """Return a value in which each `Setting` is replaced by the value of the technique's setting of that
    name.
    """
    if isinstance(value, Mapping):
        return {key: _with_settings(part, technique) for key, part in value.items()}
    return getattr(technique, value.name) if isinstance(value, Setting) else value
