"""Training in several processes with accelerate and the Trainer: DDP by accelerate, and FSDP2 by its plugin.

Both differ from torch's own. accelerate's FSDP2 (`accelerate.utils.fsdp_utils.fsdp2_prepare_model`) makes the
embedding a group of its own. The last norm with the head is another group, which stays gathered after the
forward pass. Under mixed precision it widens trained weights to fp32, and sums gradients in the dtype of the
computation (bf16). torchtitan and our own loop sum in fp32. So none of its code is copied: this file only
sets its arguments.

The mixed precision is one argument of accelerate's, for autocast (DDP) and for casting gathered weights
(FSDP2): `told_to_accelerate`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from snugfit.features.distributed.fields import PARALLEL, ParallelWish
from snugfit.step.checkpointing import layer_stacks
from snugfit.step.transformers_internals import DEVICE

if TYPE_CHECKING:
    import torch

    from snugfit.techniques.setup import Setup

OF_LAUNCHERS = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
"""Prefixes of the environment variables with which `accelerate launch` configures its processes."""

LIBRARIES = {"accelerate": "accelerate", "trainer": "the Trainer"}
"""Loops whose processes are set up by accelerate, with the name of the library in messages."""

TRY = "Leave --loop out, or try ddp or fsdp"


def why_refused(wish: ParallelWish, front_end: str) -> str:
    """Return an error text for settings that accelerate and the Trainer do not support, with an alternative;
    empty if all are supported.
    """
    if (library := LIBRARIES.get(front_end)) is None:
        return ""
    # accelerate and the Trainer cannot express a `ParallelWish` with fields other than these.
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
        (
            f"{library} keeps weights outside of layers gathered until their use. Try reshard=layers or "
            "reshard=none"
        ): (wish.weights == "sharded" and wish.reshard == "all"),
        f"shards on the host are simulated by snugfit's own loop alone. {TRY} without offload": wish.on_host,
    }
    return next((why for why, is_so in whys.items() if is_so), "")


def told_to_accelerate(setup: Setup) -> Setup:
    """Return the Setup with the dtype of gathered weights moved to autocast, because accelerate has one
    setting of mixed precision for both.
    """
    wish = PARALLEL.of(setup)
    if wish is None or wish.dtype is None:
        return setup
    return setup.with_fields(autocast=wish.dtype, parallel=replace(wish, dtype=None))


@contextlib.contextmanager
def one_of_several(device: torch.device, wish: ParallelWish) -> Iterator[None]:
    """Context in which accelerate treats this process as one of several on GPUs, in torch's existing process
    group.

    Variables of a launcher are ignored. In a simulation (tensors on `meta`) accelerate's device is `meta` and
    not CUDA, since its device mesh must exist from the beginning.
    """
    import torch.distributed as dist
    from accelerate.state import DistributedType, PartialState

    # Environment variables of a launcher would override the arguments.
    for name in [name for name in os.environ if name.startswith(OF_LAUNCHERS) and name != DEVICE]:
        del os.environ[name]
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    if device.type == "cuda":
        yield
        return
    if device.type == "meta" and wish.weights == "sharded":
        os.environ[DEVICE] = "meta"
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"  # so that DDP gets no device index
    of_gpus = (dist.get_backend(), DistributedType.MULTI_GPU)
    with patch.object(PartialState, "_prepare_backend", lambda self, *asked, **more: of_gpus):
        yield


def accelerator_arguments(wish: ParallelWish) -> dict[str, Any]:
    """Return keyword arguments of accelerate's `Accelerator` for training in several processes. One axis
    needs no `ParallelismConfig`.
    """
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
    """Return the `TrainingArguments` that distribute the model over processes, as a dict."""
    # Return the `TrainingArguments` that distribute the model over processes, as a dict by name.
    if wish.weights == "copied":
        return {}
    config = {"version": 2, "reshard_after_forward": wish.reshard != "none", "cpu_offload": wish.on_host}
    return {"fsdp": True, "fsdp_config": config, **_mesh(wish)}


def _mesh(wish: ParallelWish) -> dict[str, Any]:
    # Processes along a single axis need no device mesh.
    if wish.shards in (0, wish.ranks):
        return {}
    from accelerate.parallelism_config import ParallelismConfig

    copies = wish.ranks // wish.shards
    return {"parallelism_config": ParallelismConfig(dp_replicate_size=copies, dp_shard_size=wish.shards)}


def name_layers(accelerator: Any, model: torch.nn.Module) -> None:
    """Pass the classes of the model's layers to accelerate, as users do by `transformer_layer_cls_to_wrap`.
    FSDP2 shards each layer as a group.

    Its default is the classes that transformers marks as indivisible (`_no_split_modules`). With BERT these
    include the whole embedding. accelerate then groups a part of the embedding, which fails in torch.
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
