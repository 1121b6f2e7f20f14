"""Detection of adapters that train a prompt before each sequence, which some techniques would drop or
misplace.

A prefix precedes the keys and values of every layer. peft passes it to the model as its cache
(`past_key_values`). A layer that is computed again would write to that cache twice. So transformers gives
checkpointed layers no cache (`GradientCheckpointingLayer`), and neither does `step/checkpointing.py`. The
step runs, and trains another model, or a prefix that has no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job

KINDS = ("PREFIX_TUNING", "CARTRIDGE")
"""peft's names (`PeftType`) of the adapters whose `PeftModel.get_prompt` returns a key-value cache. peft
refuses them only if activation checkpointing is active when they are added.
"""


def dropped_prefix(job: Job) -> Iterator[str]:
    """Yield an objection to recomputing layers if the job trains prefix tuning's keys and values. The
    recomputed layers would lose them.
    """
    if job.trains and job.model.module is not None and (kind := _prefix_kind(job.model.module)):
        yield (
            f"the model's {kind} adapters give its layers a cache of keys and values. Recomputed layers do "
            "not get this cache, so the prefix would be lost. Try 'keep_all', and 'micro_batches' to save "
            "memory."
        )


def prompt_kind(module: torch.nn.Module) -> str:
    """Return peft's name for adapters that put a prompt before each sequence; empty for none."""
    kinds = (str(config.peft_type.value) for config in _configs(module) if config.is_prompt_learning)
    return next(kinds, "")


def _prefix_kind(module: torch.nn.Module) -> str:
    """Return peft's name of the prefix-tuning adapters in a module or inside of it; empty for none."""
    configs = list(_configs(module))
    return next((kind for kind in KINDS if any(config.peft_type == kind for config in configs)), "")


def _configs(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the configurations of all adapters of the module and of the modules inside."""
    for part in module.modules():
        by_name = getattr(part, "peft_config", None)
        if isinstance(by_name, dict):
            yield from by_name.values()
