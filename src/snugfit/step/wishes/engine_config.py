"""DeepSpeed's configuration for a Setup, as its engine, accelerate and the Trainer read it.

Sizes of buckets are those that accelerate and transformers put in the place of `auto`: by the model's width.
DeepSpeed's own defaults (half a billion elements) would take 2 GB whatever the model is. `overlap_comm` is
off, because one GPU has nobody to communicate with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from snugfit.techniques.deepspeed_zero import zero_section
from snugfit.units import MIB

if TYPE_CHECKING:
    from snugfit.techniques.setup import Setup

PROCESS_GROUP = 950 * MIB
"""NVML bytes that NCCL and DeepSpeed's engine add with one process: 950 and 951 MiB in two models under zero3
on one H200 (torch 2.11, DeepSpeed 0.19.8, 2026-11-24)."""


def engine_config(setup: Setup, *, batch_size: int, clip: float | None, width: int) -> dict[str, Any]:
    """What `deepspeed.initialize` is given, for a model whose hidden states have this width."""
    wish = setup.sharding
    assert wish is not None
    rows = max(1, batch_size // setup.micro_batches)
    return {
        "train_batch_size": rows * setup.micro_batches,
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": setup.micro_batches,
        "gradient_clipping": clip or 0.0,
        "bf16": {"enabled": wish.dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero_section(wish, bucket_sizes(width)),
    }


def bucket_sizes(width: int) -> dict[str, Any]:
    """What accelerate (`Accelerator._prepare_deepspeed`) and transformers (`trainer_config_finalize`) put in
    the place of `auto`."""
    return {
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    }


def width_of(config: Any) -> int:
    """Of a model's hidden states, as accelerate and transformers find it; the widest of several."""
    return int(config.hidden_size if hasattr(config, "hidden_size") else max(config.hidden_sizes))
