"""Training in several processes with accelerate and the Trainer: DDP by accelerate, and FSDP2 by its plugin.

Both differ from torch's own. accelerate's FSDP2 (`accelerate.utils.fsdp_utils.fsdp2_prepare_model`) makes the
embedding a group of its own. The last norm with the head is another group, which stays gathered after the
forward pass. Under mixed precision it widens trained weights to fp32, and sums gradients in the dtype of the
computation (bf16). torchtitan and our own loop sum in fp32. So none of its code is copied: this file only
sets its arguments.

The mixed precision is one argument of accelerate's, for autocast (DDP) and for casting gathered weights
(FSDP2): `setup_for_accelerate`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from snugfit.errors import UsageError
from snugfit.features.distributed.apply.eight_bit_shards import EIGHT_BIT
from snugfit.features.distributed.fields import ParallelWish
from snugfit.step.checkpointing import layer_stacks
from snugfit.step.transformers_internals import DEVICE
from snugfit.step.wishes.handler import Context, Handler
from snugfit.techniques.registry import tensors_beside
from snugfit.techniques.wish import used_wishes

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup

OF_LAUNCHERS = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
"""Prefixes of the environment variables with which `accelerate launch` configures its processes."""

LIBRARIES = {"accelerate": "accelerate", "trainer": "the Trainer"}
"""Loops whose processes are set up by accelerate, with the name of the library in messages."""

TRY = "Leave --loop out, or try ddp or fsdp"


WHOLE_4_BIT = "accelerate's FSDP2 leaves 4-bit weights whole on each GPU, and only snugfit train shards them"
"""Reason to refuse accelerate and the Trainer. Source: `fsdp2_prepare_model` of accelerate 1.15, which has
these weights in `ignored_params`.
"""


WHOLE_8_BIT = (
    "bitsandbytes' optimizers take no shards of FSDP2 by themselves, and only snugfit train updates parts"
)
"""Reason to refuse 8-bit optimizer states on shards elsewhere. Source: bitsandbytes issue 1633."""

UNTESTED = (
    "replaced kernels and compiled layers were not tested in several processes of accelerate or the Trainer"
)
"""Reason to refuse these techniques in loops of other libraries."""


class AccelerateHandler(Handler):
    """The part of the handler of the field `parallel` that concerns accelerate and the Trainer."""

    def why_refused(self, value: ParallelWish, front_end: str) -> str:
        """Return an error text for settings that accelerate and the Trainer do not support, with an
        alternative; empty if all are supported.
        """
        if (library := LIBRARIES.get(front_end)) is None:
            return ""
        whys = {
            f"{library} cannot place the states of torch's ZeroRedundancyOptimizer. {TRY}": (
                value.states == "sharded"
            ),
            f"{library} is simulated with ddp, fsdp and hsdp alone. {TRY}": (
                value.ranks_of_one_part > 1 or value.weights == "alone"
            ),
            "TrainingArguments have no word for gradients in buckets. Try ddp without bucket_views": (
                value.bucket_views and front_end == "trainer"
            ),
            (
                f"{library} keeps weights outside of layers gathered until their use. Try reshard=layers or "
                "reshard=none"
            ): (value.weights == "sharded" and value.reshard == "all"),
            f"shards on the host are simulated by snugfit's own loop alone. {TRY} without offload": (
                value.on_host
            ),
        }
        return next((why for why, is_so in whys.items() if is_so), "")

    def setup_for_accelerate(self, value: ParallelWish, setup: Setup) -> Setup:
        """Return the Setup with the dtype of gathered weights moved to autocast, because accelerate has one
        setting of mixed precision for both.
        """
        if value.dtype is None:
            return setup
        return setup.with_fields(autocast=value.dtype, parallel=replace(value, dtype=None))

    def around_accelerate(self, value: ParallelWish, device: torch.device) -> Context | None:
        """Return the context in which accelerate treats this process as one of several in torch's process
        group.
        """
        return functools.partial(one_of_several, device, value)

    def build_for_accelerate(self, value: ParallelWish, setup: Setup, build: Callable[..., Any]) -> Any:
        """Return a model on the host, from which accelerate moves each process's shards to its GPU. Raises
        `UsageError` for quantized weights, which accelerate does not shard, and for settings that were not
        tested in several processes of accelerate.
        """
        replaces_kernels = any("triton" in one.packages for one in used_wishes(setup))
        if setup.lowering is not None or replaces_kernels:
            raise UsageError(f"{UNTESTED}. Take --loop plain.")
        if value.weights != "sharded":
            return None
        if setup.optimizer_path in EIGHT_BIT:
            raise UsageError(f"{WHOLE_8_BIT}. Take --loop plain, or try 'adamw'.")
        model = build(stays=True)
        if any(tensors_beside(weight) for weight in model.parameters()):
            raise UsageError(f"{WHOLE_4_BIT}. Take --loop plain, or try ddp.")
        if setup.autocast:
            widen(model)
        return model

    def set_accelerator(self, value: ParallelWish, accelerator: Any, model: Any) -> None:
        """Pass the classes of the model's layers to accelerate, as users do by
        `transformer_layer_cls_to_wrap`. FSDP2 shards each layer as a group.

        Its default is the classes that transformers marks as indivisible (`_no_split_modules`). With BERT
        these include the whole embedding. accelerate then groups a part of it, which fails in torch.
        """
        if value.weights != "sharded":
            return
        plugin = accelerator.state.fsdp_plugin
        plugin.transformer_cls_names_to_wrap = sorted(
            {type(layer).__name__ for stack in layer_stacks(model) for layer in stack}
        )

    def accelerator_arguments(self, value: ParallelWish) -> dict[str, Any]:
        """Return keyword arguments of accelerate's `Accelerator` for training in several processes. One axis
        needs no `ParallelismConfig`.
        """
        if value.weights == "copied":
            from accelerate.utils import DistributedDataParallelKwargs

            return {
                "kwargs_handlers": [DistributedDataParallelKwargs(gradient_as_bucket_view=value.bucket_views)]
            }
        from accelerate.utils import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=value.reshard != "none",
            auto_wrap_policy="transformer_based_wrap",
            cpu_offload=value.on_host,
        )
        return {"fsdp_plugin": plugin, **_mesh(value)}

    def training_arguments(self, value: ParallelWish, job: Job, device: torch.device) -> dict[str, Any]:
        """Return the `TrainingArguments` that distribute the model over processes, as a dict."""
        if value.weights == "copied":
            return {}
        config = {
            "version": 2,
            "reshard_after_forward": value.reshard != "none",
            "cpu_offload": value.on_host,
        }
        return {"fsdp": True, "fsdp_config": config, **_mesh(value)}


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


def _mesh(wish: ParallelWish) -> dict[str, Any]:
    # Processes along a single axis need no device mesh.
    if wish.shards in (0, wish.ranks):
        return {}
    from accelerate.parallelism_config import ParallelismConfig

    copies = wish.ranks // wish.shards
    return {"parallelism_config": ParallelismConfig(dp_replicate_size=copies, dp_shard_size=wish.shards)}


def widen(model: torch.nn.Module) -> None:
    """Cast trained weights to fp32, as accelerate does under mixed precision before it shards a model."""
    import torch

    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.to(torch.float32)
