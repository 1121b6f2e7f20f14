"""Facts that identify a trainer's run: its arguments, its data, its model.

`TrainingArguments` and the additions of a subclass (a DPO's `beta`) are compared, except `FREE`. Free
arguments concern logs, evaluation, saving, names, uploads and the work of a loader. Others are free because
the recipe or the global batch replaces them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from snugfit.frontends.trainer.setup import brings_optimizer
from snugfit.step.transformers_internals import has_users_schedule
from snugfit.training.checkpoint.code_facts import code_facts
from snugfit.training.checkpoint.facts import (
    Facts,
    flatten,
    forward_facts,
    model_facts,
    optimizer_facts,
    settings_of,
)
from snugfit.training.run.run import LENGTH_OPTIONS, depends_on_length

FREE = frozenset({
    # replaced by the recipe or the global batch, or compared at the optimizer
    "optim", "bf16", "fp16", "tf32", "half_precision_backend", "per_device_train_batch_size",
    "gradient_accumulation_steps", "gradient_checkpointing", "gradient_checkpointing_kwargs",
    "activation_checkpointing", "activation_checkpointing_kwargs", "auto_find_batch_size", "mixed_precision",
    # without effect on a step, or compared elsewhere
    "output_dir", "overwrite_output_dir", "run_name", "project", "report_to", "disable_tqdm", "debug",
    "prediction_loss_only", "load_best_model_at_end", "push_to_hub", "ignore_data_skip",
    "restore_callback_states_from_checkpoint", "resume_from_checkpoint",
    "include_for_metrics", "batch_eval_metrics", "include_num_input_tokens_seen", "include_tokens_per_second",
    "enable_jit_checkpoint", "skip_memory_metrics", "use_cpu", "local_rank", "use_cache", "full_determinism",
    "average_tokens_across_devices", "remove_unused_columns", "torch_empty_cache_steps", "jit_mode_eval",
    "bf16_full_eval", "fp16_full_eval", "parallelism_config", "deepspeed", "predict_with_generate",
    "dataset_num_proc", "generate_during_eval", "activation_offloading",
    "per_device_eval_batch_size", "distributed_state", "deepspeed_plugin",
    # work of a loader, without effect on its order
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
    "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order",
})  # fmt: skip
"""Arguments without effect on a step's results, or compared elsewhere."""

FREE_BEGINNINGS = (
    "eval_", "save_", "log_", "logging_", "hub_", "trackio_", "ddp_", "fsdp", "torch_compile", "do_", "push_",
    "generation_", "torchdynamo", "ray_", "past_", "tpu_", "xla", "mp_",
)  # fmt: skip
"""Prefixes of the names of more such arguments."""

OF_THE_BEST_MODEL = ("metric_for_best_model", "greater_is_better")
"""Arguments that may be added or removed, but not changed: the best value so far is of that metric."""


def run_facts(trainer: Any) -> Facts:
    """Return facts about a trainer before it trains, including its optimizer if it has one."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate's wrapper
    return {
        **(_code(trainer) if trainer.snugfit.compare_code else {}),
        **({} if optimizer is None else optimizer_facts(optimizer)),
        **_arguments(trainer),
        **settings_of("data_collator", trainer.data_collator),
        **model_facts(trainer.model),
    }


def with_global_batch(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's description with the global `batch_size`, instead of that of each process."""
    processes = about.get("processes", 1)
    return {**about, "processes": processes, "batch_size": about["batch_size"] * processes}


def _code(trainer: Any) -> Facts:
    """Return facts about the user's functions in a step: collator, loss, and the methods of a subclass."""
    kinds = [kind for kind in type(trainer).__mro__ if not kind.__module__.startswith("snugfit.")]
    methods = {
        name: next(vars(holder)[name] for holder in (trainer, *kinds) if name in vars(holder))
        for name in ("compute_loss", "training_step")
    }
    functions = {"data_collator": trainer.data_collator, "compute_loss_func": trainer.compute_loss_func}
    return code_facts({**functions, **methods}) | forward_facts(trainer.model)


def _arguments(trainer: Any) -> Facts:
    args = trainer.args
    given = {
        name: value
        for name, value in vars(args).items()
        if name not in FREE
        and not name.startswith((*FREE_BEGINNINGS, "_"))
        and (value is not None or name not in OF_THE_BEST_MODEL)
    }
    if not brings_optimizer(trainer):  # so that it is refused before any weight is restored
        given["optim"] = getattr(args.optim, "value", args.optim).removesuffix("_fused")
    accelerators = vars(args.accelerator_config) if hasattr(args.accelerator_config, "__dict__") else {}
    given["accelerator_config"] = accelerators
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if has_users_schedule(trainer) or not depends_on_length(schedule, args.warmup_steps):
        given = {name: value for name, value in given.items() if name not in LENGTH_OPTIONS}
    elif args.max_steps > 0:
        given.pop("num_train_epochs", None)
    return flatten("", given)
