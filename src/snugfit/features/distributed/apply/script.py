"""Several processes in an exported script: its template's fields for a `ParallelWish`, or why there are none.

A script of torch's repeats `parallel.py`, line by line. accelerate and the Trainer shard a model by code of
their own, which their files configure. The comments there come from `ACCELERATE_S_FSDP`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from snugfit.features.distributed.fields import ParallelWish
from snugfit.step.checkpointing import layer_names
from snugfit.step.wishes.precision import MIXED
from snugfit.step.wishes.python_text import CallText, keywords_text
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.step.wishes.handler import ScriptContext

ACCELERATE_S_FSDP = (
    "accelerate's FSDP2 makes the embedding a group of its own, and the last norm with the head another one, "
    "which stays gathered after the forward pass. Under bf16 it trains weights in float32, sums gradients in "
    "bf16 and casts what the model gives to bf16, where snugfit's own loop sums in float32 and casts no "
    "output. So its bytes and losses are those of --loop accelerate or trainer, not of the plain loop"
)
"""`accelerate.utils.fsdp_utils.fsdp2_prepare_model` and the plugin's `set_mixed_precision` of 1.15."""


def _imports(wish: ParallelWish) -> tuple[str, ...]:
    """Return the imports that shard a model in a script of torch's."""
    if wish.weights == "copied":
        return ("from torch.nn.parallel import DistributedDataParallel",)
    names = (*(("CPUOffloadPolicy",) if wish.on_host else ()), "MixedPrecisionPolicy", "fully_shard")
    return (
        "from torch.distributed.device_mesh import init_device_mesh",
        f"from torch.distributed.fsdp import {', '.join(names)}",
    )


def parallel_fields(wish: ParallelWish, context: ScriptContext) -> dict[str, Any]:
    """Return the values of a template. Raises `RecipeError` for a setting that its script does not
    support.
    """
    cuts_more = [one.slot for one in context.recipe if one.needs_several_gpus and one.slot != Slot.SHARDING]
    if cuts_more:
        raise context.refusal(cuts_more[0], "scripts for several GPUs share the batch among them alone")
    if why := _why_not(wish, context.target):
        raise context.refusal(Slot.SHARDING, why)
    more: dict[str, Any] = {"mixed": MIXED[wish.dtype]} if wish.dtype else {}
    if wish.states == "sharded":
        factory = context.setup.optimizer.factory
        kind, numbers = factory.path.replace(":", "."), keywords_text(factory.arguments)
        more["optimizer_of_part"] = CallText(
            imported="from torch.distributed.optim import ZeroRedundancyOptimizer",
            called=f"ZeroRedundancyOptimizer(parameters, {kind}, lr=LEARNING_RATE{numbers})",
        )
    shards = wish.shards or wish.data_ranks
    copies = wish.data_ranks // shards
    return more | {
        "parallel": {
            "weights": wish.weights,
            "bucket_views": wish.bucket_views,
            "mesh": {"shard": shards} if copies == 1 else {"replicate": copies, "shard": shards},
            "imports": _imports(wish),
            "reshard": wish.reshard,
            "on_host": wish.on_host,
            "dtype": f"torch.{wish.dtype}" if wish.dtype else "",
            "layers": layer_names(context.job) if wish.weights == "sharded" else (),
        },
        "note": ACCELERATE_S_FSDP if wish.weights == "sharded" and context.target != "torch" else "",
    }


def _why_not(wish: ParallelWish, target: str) -> str:
    """Return why no script of this target is written; empty if one is."""
    if target == "torch":
        return ""
    if target == "deepspeed":
        return "its steps are not those of DeepSpeed's engine"
    if wish.states == "sharded":
        return "accelerate does not place the states of torch's ZeroRedundancyOptimizer"
    if wish.weights == "sharded" and wish.reshard == "all":
        return "accelerate keeps what is in no layer gathered until it was used. Try reshard=layers"
    return ""
