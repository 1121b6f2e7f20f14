"""DeepSpeed's configuration for a Setup, as its engine, accelerate and the Trainer read it.

Sizes of buckets are those that accelerate and transformers compute for `auto`, from the model's width.
DeepSpeed's own defaults (half a billion elements) would take 2 GB for any model.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from typing import TYPE_CHECKING, Any

from snugfit.errors import UsageError
from snugfit.features.distributed.fields import SHARDING
from snugfit.features.distributed.techniques.deepspeed_zero import zero_section
from snugfit.units import MIB

if TYPE_CHECKING:
    from snugfit.features.distributed.fields import ShardingWish
    from snugfit.techniques.setup import Setup

PROCESS_GROUP = {2: 560 * MIB, 3: 950 * MIB}
"""GPU memory that NCCL and DeepSpeed's engine add in one process, in bytes by NVML, by ZeRO stage. Source:
558 to 563 MiB in four runs under zero2, and 950 and 951 MiB in two under zero3. Each ran on one H200 (torch
2.11, DeepSpeed 0.19.8, 2026-11-24); one on an H100 had 956.
"""

BUILT_WITHIN = 570 * MIB
"""These bytes for a model under ZeRO stage 3 that is built within `zero.Init`, as by accelerate and the
Trainer. Source: one run on an H100 (results/h100-2026-11-25/techniques/bert-zero3-trainer.json).
"""


def is_of_engine(optimizer: Any) -> bool:
    """Return True if this is the optimizer of DeepSpeed's engine, or a wrapper of it. The module's name is
    compared, because importing `optimizer.py` takes time.
    """
    return type(optimizer).__module__ == "snugfit.features.distributed.engine.optimizer"


def engine_config(
    setup: Setup, *, batch_size: int, clip: float | None, width: int, folder: str | None = None
) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize` as a dict. `width` is that of the hidden states,
    `batch_size` the number of samples of one process. States on a disk are in `folder`, by default in this
    run's temporary folder.
    """
    wish = SHARDING.of(setup)
    assert wish is not None
    rows = max(1, setup.per_piece(batch_size))
    return {
        "train_batch_size": rows * setup.micro_batches * wish.ranks,
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": setup.micro_batches,
        "gradient_clipping": clip or 0.0,
        "bf16": {"enabled": wish.dtype == "bfloat16"},
        # DeepSpeed refuses optimizers that are not on its own list.
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero_section(wish, bucket_sizes(width), folder or swap_folder(wish)),
    }


def swap_folder(wish: ShardingWish) -> str:
    """Return this process's swap folder among temporary files (`TMPDIR`), which exists until a run ends.
    Empty if nothing goes to a disk.
    """
    return _own_folder() if "nvme" in (wish.states, wish.weights) else ""


@cache
def _own_folder() -> str:
    return tempfile.mkdtemp(prefix="snugfit-swap-")


def remove_swap_folder() -> None:
    """Remove this process's folder with the states that were swapped to disk, if it exists."""
    if _own_folder.cache_info().currsize:
        shutil.rmtree(_own_folder(), ignore_errors=True)
        _own_folder.cache_clear()


def refuse_without_file_operator(wish: ShardingWish) -> None:
    """Raise `UsageError` if optimizer states go to a disk and DeepSpeed's operator for files cannot be
    compiled.
    """
    if "nvme" not in (wish.states, wish.weights):
        return
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        raise UsageError(
            "offload=nvme needs DeepSpeed's operator for files (async_io), which does not build here: it "
            "needs a compiler and libaio with its headers (libaio-dev). Install them, or use offload=cpu. "
            "snugfit predict and snugfit export need neither."
        )


def bucket_sizes(width: int) -> dict[str, Any]:
    """Return DeepSpeed's bucket sizes in elements that accelerate (`Accelerator._prepare_deepspeed`) and
    transformers (`trainer_config_finalize`) compute for `auto`.
    """
    return {
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    }


def width_of(config: Any) -> int:
    """Return the width of a model's hidden states, as accelerate and transformers compute it; the widest of
    several.
    """
    return int(config.hidden_size if hasattr(config, "hidden_size") else max(config.hidden_sizes))
