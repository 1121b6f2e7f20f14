"""DeepSpeed's configuration file for a recipe, with all numbers in it: `auto` is for the Trainer alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from snugfit.exchange.script import samples_at_once, setup_on
from snugfit.step.wishes.engine.config import bucket_sizes, width_of
from snugfit.techniques.deepspeed_zero import zero_section

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe


def deepspeed_config(job: Job, recipe: Recipe, gpus: int) -> dict[str, Any]:
    """What `deepspeed.initialize` is given on so many GPUs; empty where its engine runs no such recipe."""
    setup = setup_on(recipe, gpus)
    wish = setup.sharding
    if wish is None:
        return {}
    return {
        "train_batch_size": job.batch_size,
        "train_micro_batch_size_per_gpu": samples_at_once(job, recipe, gpus),
        "gradient_accumulation_steps": setup.micro_batches,
        "gradient_clipping": job.clip or 0.0,
        "bf16": {"enabled": wish.dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero_section(wish, bucket_sizes(width_of(job.transformers_config()))),
    }
