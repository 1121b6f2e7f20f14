"""Several processes in accelerate and the Trainer: DDP by accelerate, and FSDP2 by its plugin.

Both differ from torch's own. accelerate's FSDP2 (`accelerate.utils.fsdp_utils.fsdp2_prepare_model`) makes the
embedding a group of its own. The last norm with the head is another group, which stays gathered after the
forward pass. Under mixed precision it widens trained weights to fp32, and sums gradients in the dtype of the
computation (bf16). torchtitan and our own loop sum in fp32. So none of its code is copied: this file only
sets its arguments.

The mixed precision is one argument of accelerate's, for autocast (DDP) and for casting gathered weights
(FSDP2): `told_to_accelerate`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from snugfit.step.checkpointing import layer_stacks
from snugfit.techniques.setup import ParallelWish

if TYPE_CHECKING:
    import torch

    from snugfit.techniques.setup import Setup

LIBRARIES = {"accelerate": "accelerate", "trainer": "the Trainer"}
"""Loops with accelerate's processes, each with its library's name."""

TRY = "Leave --loop out, or try ddp or fsdp"


def why_refused(wish: ParallelWish, front_end: str) -> str:
    """Return the settings that accelerate and the Trainer do not have, with an alternative; empty if they
    have all.
    """
    if (library := LIBRARIES.get(front_end)) is None:
        return ""
    known = ParallelWish(
        weights=wish.weights,
        ranks=wish.ranks,
        shards=wish.shards,
        reshard=wish.reshard,
        on_host=wish.on_host,
        dtype=wish.dtype,
        bucket_views=wish.bucket_views,
    )
    whys = {
        f"{library} cannot place the states of torch's ZeroRedundancyOptimizer. {TRY}": (
            wish.states == "sharded"
        ),
        f"{library} is simulated with ddp, fsdp and hsdp alone. {TRY}": (
            wish != replace(known, states=wish.states) or wish.weights not in ("copied", "sharded")
        ),
        "TrainingArguments have no word for gradients in buckets. Try ddp without bucket_views": (
            wish.bucket_views and front_end == "trainer"
        ),
        f"{library} keeps what is in no layer until it was used. Try reshard=layers or reshard=none": (
            wish.weights == "sharded" and wish.reshard == "all"
        ),
        f"shards on the host are simulated by snugfit's own loop alone. {TRY} without offload": wish.on_host,
    }
    return next((why for why, is_so in whys.items() if is_so), "")


def told_to_accelerate(setup: Setup) -> Setup:
    """Return the same Setup, with the dtype of gathered weights as accelerate's mixed precision."""
    wish = setup.parallel
    if wish is None or wish.dtype is None:
        return setup
    return replace(setup, autocast=wish.dtype, parallel=replace(wish, dtype=None))


def is_spread(setup: Setup) -> bool:
    """Return whether each of several processes holds a part of the weights."""
    return setup.parallel is not None and setup.parallel.weights == "sharded"


def accelerator_arguments(wish: ParallelWish) -> dict[str, Any]:
    """Return arguments of `Accelerator`. One row of processes needs no `ParallelismConfig`."""
    if wish.weights == "copied":
        from accelerate.utils import DistributedDataParallelKwargs

        return {"kwargs_handlers": [DistributedDataParallelKwargs(gradient_as_bucket_view=wish.bucket_views)]}
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=wish.reshard != "none",
        auto_wrap_policy="transformer_based_wrap",
        cpu_offload=wish.on_host,
    )
    return {"fsdp_plugin": plugin, **_mesh(wish)}


def training_arguments(wish: ParallelWish) -> dict[str, Any]:
    """`TrainingArguments`; without any the Trainer of one of several processes takes DDP."""
    if wish.weights == "copied":
        return {}
    config = {"version": 2, "reshard_after_forward": wish.reshard != "none", "cpu_offload": wish.on_host}
    return {"fsdp": True, "fsdp_config": config, **_mesh(wish)}


def _mesh(wish: ParallelWish) -> dict[str, Any]:
    if wish.shards in (0, wish.ranks):
        return {}
    from accelerate.parallelism_config import ParallelismConfig

    copies = wish.ranks // wish.shards
    return {"parallelism_config": ParallelismConfig(dp_replicate_size=copies, dp_shard_size=wish.shards)}


def name_layers(accelerator: Any, model: torch.nn.Module) -> None:
    """Pass the layers' classes to accelerate, each of which becomes a group, as users do by
    `transformer_layer_cls_to_wrap`.

    Its default is the classes that transformers marks as indivisible (`_no_split_modules`). With BERT these
    include the whole embedding. accelerate then makes a group of a part of it, which fails in torch.
    """
    plugin = accelerator.state.fsdp_plugin
    plugin.transformer_cls_names_to_wrap = sorted(
        {type(layer).__name__ for stack in layer_stacks(model) for layer in stack}
    )


def widen(model: torch.nn.Module) -> None:
    """Cast trained weights to fp32, as accelerate does under mixed precision before it shards a model."""
    import torch

    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.to(torch.float32)
