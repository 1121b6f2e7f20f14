"""Adapters that put a prefix of keys and values before every layer's own, which checkpointing would drop.

peft hands the model such a prefix as its cache (`past_key_values`). A layer that is computed again would
write to that cache twice, so transformers gives checkpointed layers none (`GradientCheckpointingLayer`), and
ours get none either (`step/checkpointing.py`): the step runs, and trains another model, or a prefix that has
no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job

KINDS = ("PREFIX_TUNING", "CARTRIDGE")
"""peft's names (`PeftType`) for the adapters whose `PeftModel.get_prompt` gives a cache. peft refuses them on
a model whose checkpointing is on, and does not look again."""


def dropped_prefix(job: Job) -> Iterator[str]:
    """The objection of a technique that computes layers again, where the job trains such adapters."""
    if job.trains and job.model.module is not None and (kind := _prefix_kind(job.model.module)):
        yield (
            f"the model's {kind} adapters give its layers a cache of keys and values. Recomputed layers do "
            "not get this cache, so the prefix would be lost. Try 'keep_all', and 'micro_batches' to save "
            "memory."
        )


def _prefix_kind(module: torch.nn.Module) -> str:
    """peft's name for the module's adapters of this kind, or for those of a module inside; empty for none."""
    adapters = (getattr(part, "peft_config", None) for part in module.modules())
    configs = [config for by_name in adapters if isinstance(by_name, dict) for config in by_name.values()]
    return next((kind for kind in KINDS if any(config.peft_type == kind for config in configs)), "")
