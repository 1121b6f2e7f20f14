"""Export of a recipe for the tools that fine-tune language models: TRL, axolotl and LLaMA-Factory.

All three run transformers' Trainer, so each file contains the Trainer's arguments. It also overrides the
tool's own defaults for loading and dtypes, so that it runs as predicted. An unsupported technique raises an
error with its name. The sources are TRL 1.16 (sft_config.py, sft_trainer.py); axolotl at 067b021c
(loaders/model.py, core/builders/base.py, utils/config, utils/schemas); LLaMA-Factory at ff6d4d12 (hparams,
model/loader.py, model/adapter.py, model_utils/checkpointing.py).
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from snugfit.errors import RecipeError, UsageError, some_of
from snugfit.features.exchange.dialect import dialect
from snugfit.features.exchange.script import folder_or_id, script_values, write_script, writer
from snugfit.features.exchange.trainer_arguments import training_arguments, write_arguments
from snugfit.job.job import Task
from snugfit.job.own_checkpointing import NAMES
from snugfit.techniques import roster
from snugfit.techniques.setup import CheckpointWish
from snugfit.techniques.technique import ALL_LINEAR, Slot

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe

_DATASET = "DATASET"
"""Placeholder for the user's own dataset."""

_HYPERPARAMETERS = "The learning rate is constant, and there is one epoch: set your own, they change no byte."

NOTES = {
    "trl": "Predicted with sequences that fill max_length. TRL 1.16 always computes the loss in chunks, "
    f"which takes less than all logits at once. {_HYPERPARAMETERS}",
    "axolotl": f"Every sequence is filled up to sequence_len, as it was predicted. {_HYPERPARAMETERS}",
    "llamafactory": "Predicted with sequences that fill cutoff_len; a batch of shorter ones takes less. "
    f"{_HYPERPARAMETERS}",
}
"""Differences to the prediction, and settings that recipes do not contain, by target. The exported file
contains this note, and the command prints it.
"""

_VARIANTS = ("use_dora", "use_rslora")
"""peft's switches for variants of LoRA that change an adapter's computation. The tools use the same names."""

_NOT_COMPARED = (
    "lora.modules_to_save", "lora.exclude_modules", "lora.target_parameters", "lora.layers_to_transform",
    "lora.rank_pattern", "lora.alpha_pattern", "lora.bias", "model.quantization_config.load_in_8bit",
)  # fmt: skip
"""Adapter arguments that are refused, because files of these tools with them were not compared."""

_LLAMAFACTORY_ATTENTION = {"sdpa": "sdpa", "eager": "disabled", "flash_attention_2": "fa2"}

_HALVES = {"bf16": "bfloat16", "fp16": "float16"}


def check_task(job: Job, to: str) -> None:
    """Raise `UsageError` if the fine-tuning tool `to` does not train the job's task."""
    if job.task is not Task.CAUSAL_LM:
        raise UsageError(
            f"{to} fine-tunes language models (causal-lm), and this task is {job.task}. Export to hf, "
            "accelerate or torch."
        )


def trl_script(job: Job, recipe: Recipe) -> str:
    """Return a Python script for TRL with `SFTConfig`, `LoraConfig` and `SFTTrainer`. Raises `RecipeError`
    for a technique that TRL does not support.
    """
    recipe = recipe.with_(roster.plain(Slot.HEAD))  # TRL always uses its own loss
    arguments = _trainer_arguments(job, recipe, "trl")
    arguments |= {"output_dir": "sft_output", "num_train_epochs": 1}
    arguments |= {"max_length": job.sequence_length, "packing": False, "loss_type": "nll"}
    dotted = write_arguments(recipe)[0]
    script = script_values(job, recipe, "trl", dotted, training_arguments=arguments)
    lora = _lora(job, recipe)
    if lora:
        script["lora"] = {**lora, "task_type": "CAUSAL_LM"}
    head = _head(job, "trl")
    return write_script("trl", {"lora": None, "dataset": _DATASET, "head": head, **script})


def axolotl_config(job: Job, recipe: Recipe) -> str:
    """Return a YAML file for `axolotl train`. Raises `RecipeError` for a technique that axolotl does not
    support.
    """
    arguments = _trainer_arguments(job, recipe, "axolotl")
    _refuse_other_layers(arguments, job, recipe, "axolotl")
    lora, precision = _lora(job, recipe), recipe[Slot.PRECISION]
    weights, autocast = _dtypes(job, recipe)
    half = next((name for name in _HALVES if arguments[name]), None)
    if weights != (_HALVES[half] if half else "float32"):
        loads = _HALVES[half] if half else "float32"
        raise _refusal(
            "axolotl", precision,
            f"axolotl loads the weights in {loads} for this, and they are {weights} here. It trains bf16 "
            "over weights in bfloat16 (--dtype bfloat16), fp16 over float16, and float32 without either",
        )  # fmt: skip
    if autocast and lora is None:
        raise _refusal(
            "axolotl", precision,
            "where all weights train, axolotl raises embeddings and normalisations to 32 bits, which was not "
            "predicted. It does not where adapters train",
        )  # fmt: skip
    four_bits = _four_bits(job, recipe)
    adapter: dict[str, Any] = {"adapter": None}
    if lora:
        targets = lora["target_modules"]
        chosen = {"lora_target_linear": True} if targets == ALL_LINEAR else {"lora_target_modules": targets}
        adapter = {
            "adapter": "qlora" if four_bits else "lora", "lora_r": lora["r"],
            "lora_alpha": lora["lora_alpha"], "lora_dropout": lora["lora_dropout"],
            **chosen, **{f"peft_{name}": True for name in _VARIANTS if lora.get(name)},
            # axolotl's own kernels for adapters are not predicted, so they are off.
            "lora_mlp_kernel": False, "lora_qkv_kernel": False, "lora_o_kernel": False,
        }  # fmt: skip
    checkpointing = arguments.pop("gradient_checkpointing_kwargs", None)
    renamed = {
        "per_device_train_batch_size": "micro_batch_size", "optim": "optimizer",
        "lr_scheduler_type": "lr_scheduler",
    }  # fmt: skip
    loader = {name: arguments.pop(name) for name in list(arguments) if name.startswith("dataloader_")}
    train = {renamed.get(name, name): value for name, value in arguments.items() if name != "output_dir"}
    if checkpointing:
        train["gradient_checkpointing_kwargs"] = checkpointing
    sections = {
        "the model": {
            "base_model": folder_or_id(job), "load_in_8bit": False, "load_in_4bit": bool(four_bits),
            **four_bits, "attn_implementation": recipe.setup().attention, **adapter,
        },
        f"your data in place of {_DATASET}": {
            "datasets": [{"path": _DATASET, "type": "chat_template"}], "val_set_size": 0,
            "sequence_len": job.sequence_length, "sample_packing": False, "pad_to_sequence_len": True,
            **loader,
        },
        "the training": {"num_epochs": 1, **train, "output_dir": "axolotl_output"},
    }  # fmt: skip
    return _yaml(job, recipe, "axolotl", "axolotl train axolotl.yaml", sections)


def _four_bits(job: Job, recipe: Recipe) -> dict[str, Any]:
    """Return axolotl's key for 4-bit weights; empty for other weights.

    Raises `RecipeError` if axolotl would load the unquantized weights in another dtype than predicted.
    """
    double = _double_quantization(recipe)
    if double is None:
        return {}
    left = left_in_float32(job)
    if left and _dtypes(job, recipe)[0] != "float32":
        raise _refusal(
            "axolotl", recipe[Slot.ADAPTERS],
            f"with weights in 4 bits axolotl has {some_of(left, 2)} in 32 bits, which was not predicted. "
            "It trains models in 4 bits whose linear layers have no biases, such as Llama, Mistral and Qwen3",
        )  # fmt: skip
    return {"bnb_config_kwargs": {"bnb_4bit_use_double_quant": double}}


def _double_quantization(recipe: Recipe) -> Any:
    """Return True if the scales of 4-bit weights are quantized too (`bnb_4bit_use_double_quant`); None
    without 4-bit weights.
    """
    return write_arguments(recipe)[0].get("model.quantization_config.bnb_4bit_use_double_quant")


def left_in_float32(job: Job) -> list[str]:
    """Return the parameters that axolotl keeps in float32 when it trains this job's model in 4 bits.

    peft's `prepare_model_for_kbit_training` raises all unquantized weights to float32. axolotl then casts
    normalisations, embeddings and the head, found by name, to the lower dtype again.
    """
    import torch
    from torch import nn
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    from snugfit.job.build import instantiate

    with torch.device("meta"):
        model = instantiate(job, dtype="float32", attention="sdpa")
    table, kind = dialect("axolotl").four_bits, job.model.config.get("model_type")
    whole = [*get_keys_to_not_convert(model), *table["whole"].get(kind, ())]
    embeddings = table["recast"].get(kind, table["recast"]["*"])
    left = []
    for name, module in model.named_modules():
        is_linear = type(module) in (nn.Linear, Conv1D)
        is_quantized = is_linear and should_convert_module(name, whole)
        if "norm" in name or (any(part in name for part in embeddings) and hasattr(module, "weight")):
            continue
        for own, _ in module.named_parameters(recurse=False):
            if not (is_quantized and own == "weight"):
                left.append(f"{name}.{own}".lstrip("."))
    return left


def _llamafactory_attention(recipe: Recipe) -> str:
    named = _LLAMAFACTORY_ATTENTION.get(recipe.setup().attention)
    if named is None:
        raise _refusal("llamafactory", recipe[Slot.ATTENTION], "it has no such attention (flash_attn)")
    return named


def llamafactory_config(job: Job, recipe: Recipe) -> str:
    """Return a YAML file for `llamafactory-cli train`. Raises `RecipeError` for unsupported techniques."""
    arguments = _trainer_arguments(job, recipe, "llamafactory")
    _refuse_other_layers(arguments, job, recipe, "llamafactory")
    arguments.pop("gradient_checkpointing_kwargs", None)
    keeps_all = not arguments.pop("gradient_checkpointing")
    lora, precision = _lora(job, recipe), recipe[Slot.PRECISION]
    weights, autocast = _dtypes(job, recipe)
    loads = job.model.dtype or "float32"
    if lora is None and not (weights == "float32" or weights == loads == "bfloat16"):
        raise _refusal(
            "llamafactory", precision,
            "LLaMA-Factory trains all weights in float32, or, where the checkpoint is in bfloat16, in that "
            f"(pure_bf16). Here the checkpoint is in {loads}, and {weights} is to train",
        )  # fmt: skip
    if lora and weights != loads:
        raise _refusal(
            "llamafactory", precision,
            f"LLaMA-Factory freezes the weights in their checkpoint's dtype, {loads}, and they are {weights} "
            "here. Leave --dtype out, and let no technique cast them",
        )  # fmt: skip
    method: dict[str, Any] = {"finetuning_type": "full"}
    if lora:
        targets = lora["target_modules"]
        if isinstance(targets, str) and targets != ALL_LINEAR:
            raise _refusal(
                "llamafactory", recipe[Slot.ADAPTERS], "it takes names of modules as targets, and no pattern"
            )
        method = {
            "finetuning_type": "lora", "lora_rank": lora["r"], "lora_alpha": lora["lora_alpha"],
            "lora_dropout": lora["lora_dropout"],
            "lora_target": "all" if targets == ALL_LINEAR else ",".join(targets),
            **{name: True for name in _VARIANTS if lora.get(name)},
        }  # fmt: skip
    double = _double_quantization(recipe)
    bits = (
        {"quantization_bit": 4, "quantization_type": "nf4", "double_quantization": double}
        if double is not None
        else {}
    )
    pure = weights == "bfloat16" and (lora is None or autocast is None)
    loader = {name: arguments.pop(name) for name in list(arguments) if name.startswith("dataloader_")}
    arguments.pop("output_dir")
    sections = {
        "model": {
            "model_name_or_path": folder_or_id(job), **bits,
            "flash_attn": _llamafactory_attention(recipe),
            # LLaMA-Factory's default is reentrant checkpointing, while snugfit's is non-reentrant.
            "disable_gradient_checkpointing": keeps_all, "use_reentrant_gc": False, "upcast_layernorm": False,
        },
        "method": {"stage": "sft", "do_train": True, **method, "pure_bf16": pure},
        f"your dataset in place of {_DATASET} (its name in dataset_info.json), and your model's template": {
            "dataset": _DATASET, "template": "default", "cutoff_len": job.sequence_length, "packing": False,
            **loader,
        },
        "train": {"num_train_epochs": 1.0, **arguments},
        "output": {"output_dir": "llamafactory_output", "logging_steps": 10, "report_to": "none"},
    }  # fmt: skip
    return _yaml(job, recipe, "llamafactory", "llamafactory-cli train llamafactory.yaml", sections)


TOOLS: dict[str, Callable[[Job, Recipe], str]] = {
    "trl": trl_script,
    "axolotl": axolotl_config,
    "llamafactory": llamafactory_config,
}
"""Functions that write the single file of each target."""


def _trainer_arguments(job: Job, recipe: Recipe, to: str) -> dict[str, Any]:
    """Return `TrainingArguments` for a fine-tuning tool, with checkpointing under its older name.

    Raises `RecipeError` for techniques whose result was not compared in these tools.
    """
    new, old = NAMES
    arguments = training_arguments(job, recipe, to)
    if to != "trl":
        # axolotl has a plugin for Liger's kernels, and LLaMA-Factory has another option name.
        arguments.pop("use_liger_kernel")
    if not recipe[Slot.KERNELS].plain:
        why = f"how {to} runs these kernels and which loss it takes with them was not compared"
        raise _refusal(to, recipe[Slot.KERNELS], why)
    if recipe.setup().lowering is not None and to != "trl":
        why = f"{to} compiles the whole model or nothing (torch_compile), which was not compared"
        raise _refusal(to, recipe[Slot.ENGINE], why)
    dotted = write_arguments(recipe)[0]
    if further := [key for key in _NOT_COMPARED if dotted.get(key)]:
        why = f"{further[0].rpartition('.')[2]} was not compared in {to}"
        raise _refusal(to, recipe[Slot.ADAPTERS], why)
    if "layers.float8" in dotted and to != "trl":
        raise _refusal(to, recipe[Slot.PRECISION], f"{to} chooses other layers for products in 8 bits (fp8)")
    return {key.replace(new, old) if key.startswith(new) else key: value for key, value in arguments.items()}


def _lora(job: Job, recipe: Recipe) -> dict[str, Any] | None:
    """Return LoRA's arguments, with the adapted modules by name; None where all weights train.

    They are `r`, `lora_alpha`, `lora_dropout`, `target_modules` and the switches of `_VARIANTS`.
    """
    dotted = write_arguments(recipe)[0]
    if dotted.get("lora.r") is None:
        return None
    adapted = recipe[Slot.ADAPTERS].adapted_modules(job)
    targets = adapted if isinstance(adapted, str) else list(adapted)
    variants = {name: True for name in _VARIANTS if dotted[f"lora.{name}"]}
    return {
        **{name: dotted[f"lora.{name}"] for name in ("r", "lora_alpha", "lora_dropout")},
        "target_modules": targets, **variants,
    }  # fmt: skip


def _dtypes(job: Job, recipe: Recipe) -> tuple[str, str | None]:
    """Return the dtype of the model's weights, and that of autocast (None without autocast)."""
    setup = recipe.setup()
    return setup.created_dtype(job), setup.autocast


def _refuse_other_layers(arguments: Mapping[str, Any], job: Job, recipe: Recipe, to: str) -> None:
    """Raise `RecipeError` if checkpointing skips some layers, which the transformers versions of these tools
    may not support.
    """
    if "every_n_layers" in (arguments.get("gradient_checkpointing_kwargs") or {}):
        every = next(
            technique.name
            for technique in roster.techniques()
            if technique.slot is Slot.CHECKPOINTING
            and any(one.value == CheckpointWish() for one in technique.settings(job))
        )
        why = f"it checkpoints every layer or none. Try {every}"
        raise _refusal(to, recipe[Slot.CHECKPOINTING], why)


def _refusal(to: str, technique: object, why: str) -> RecipeError:
    return RecipeError(
        f"This recipe cannot be exported to {to}:\n{technique}: {why}.\n"
        "Choose another technique for it, or export to hf, accelerate or torch, which can do more."
    )


def _yaml(job: Job, recipe: Recipe, to: str, command: str, sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a YAML file: a comment with its description and command, then each section under its title."""
    import yaml

    dotted = write_arguments(recipe)[0]
    before = "".join(
        f"{key.partition('.')[2]}={value} " for key, value in dotted.items() if key.startswith("environment.")
    )
    head = [str(recipe), *_head(job, to), "", f"  {before}{command}"]
    parts = ["\n".join(f"# {line}".rstrip() for line in head)]
    parts += [
        f"### {title}\n{yaml.safe_dump(dict(values), sort_keys=False).rstrip()}"
        for title, values in sections.items()
    ]
    return "\n\n".join(parts) + "\n"


def _head(job: Job, to: str) -> list[str]:
    """Return the comment at the top of an exported file. It has the training loop, differences to the
    prediction, snugfit's version and the placeholder to fill in.
    """
    step = f"A step of {job.batch_size} sequences of {job.sequence_length} tokens."
    text = f"{step} {NOTES[to]} Written by {writer(to)}; put your dataset in place of {_DATASET}."
    return textwrap.wrap(text, 100, break_on_hyphens=False)
