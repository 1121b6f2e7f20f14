"""The wish for several processes that train one model together: torch's own DDP and FSDP2.

Each process (a rank) builds the model whole, on its own GPU, and then gives its parts away or tells the
others of its gradients. Which processes there are says torch's default process group, which whoever starts
them has made. Weights are the same in all of them since all begin with one seed.

Where weights are sharded, each repeated layer is a group of its own, and the rest of the model one more, as
torch's tutorials and torchtitan have it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.step.checkpointing import layer_stacks
from snugfit.step.wishes import parallel_by_accelerate as by_accelerate
from snugfit.step.wishes.handler import Context, Handler
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from snugfit.job.job import Job
    from snugfit.techniques.setup import OptimizerWish, ParallelWish

LIVE = (
    "a live model is not spread over several GPUs. `snugfit train` does it; and a script with fit that "
    "torchrun starts trains by the Trainer's own DDP"
)


class ParallelHandler(Handler):
    """Which part of the training is this process's."""

    wish, slot = "parallel", Slot.SHARDING
    refused: ClassVar = {
        "fit": LIVE,
        "custom_loop": LIVE,
        "script": "no script for several GPUs is written. `snugfit train` runs it",
    }

    def why_refused(self, value: ParallelWish | None, front_end: str) -> str:
        """What accelerate and the Trainer have no word for."""
        return by_accelerate.why_refused(value, front_end) if value is not None else ""

    def import_code(self, value: ParallelWish | None) -> None:
        """torch's own, before anything is watched."""
        if value is not None:
            import torch.distributed.fsdp
            import torch.distributed.optim
            import torch.nn.parallel  # noqa: F401

    def distribute(self, value: ParallelWish | None, model: Any) -> Any:
        """The model in DDP, or with its weights spread over the processes."""
        if value is None:
            return model
        return in_ddp(value, model) if value.weights == "copied" else in_fsdp(value, model)

    def around_pass(self, value: ParallelWish | None, model: Any, *, is_last: bool) -> Context | None:
        """Gradients are told to the others after the last micro-batch alone."""
        if value is None:
            return None
        if value.weights == "sharded":
            return functools.partial(_fsdp_tells, model, is_last=is_last)
        return None if is_last else model.no_sync

    def accelerator_arguments(self, value: ParallelWish | None) -> dict[str, Any]:
        """accelerate's own words for it."""
        return by_accelerate.accelerator_arguments(value) if value is not None else {}

    def training_arguments(
        self, value: ParallelWish | None, job: Job, device: torch.device
    ) -> dict[str, Any]:
        """The Trainer's words for it."""
        return by_accelerate.training_arguments(value) if value is not None else {}

    def after_update(self, value: ParallelWish | None, model: Any, step: int) -> None:
        """Has NCCL let go of DDP's first buckets, once."""
        if value is not None and value.weights == "copied" and step == 0:
            _release_first_buckets(model)

    def after_evaluation(self, value: ParallelWish | None, model: Any) -> None:
        """Drops the gathered weights that FSDP2 keeps for a backward pass: until then they are the model's
        parameters, in the place of the parts that are trained and kept."""
        if value is not None and value.weights == "sharded":
            from torch.distributed.fsdp import FSDPModule

            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def _release_first_buckets(model: Any) -> None:
    """DDP makes its buckets anew in the second step. What averaged the first ones holds them until a thread
    of NCCL's, which looks every 100 ms, has seen that they are done, and another exchange then begins
    (`ProcessGroupNCCL`: `shelvesToUnstash_`, `workEnqueue`). So the second step had a set of gradients more,
    or not, by chance: 1,278 MiB of BERT-large on two H200s. Waiting for that thread, and one
    exchange, give them back at once."""
    import torch
    import torch.distributed as dist

    device = next(model.parameters()).device
    if device.type == "cuda":
        dist.group.WORLD._wait_for_pending_works()  # type: ignore[union-attr]
    dist.all_reduce(torch.zeros(1, device=device), async_op=True).wait()


@contextlib.contextmanager
def _fsdp_tells(model: Any, *, is_last: bool) -> Iterator[None]:
    model.set_requires_gradient_sync(is_last)
    yield


def in_ddp(wish: ParallelWish, model: torch.nn.Module) -> torch.nn.Module:
    """The model in `DistributedDataParallel`, whose gradients are averaged bucket by bucket."""
    from torch.nn.parallel import DistributedDataParallel

    device = next(model.parameters()).device
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=wish.bucket_views,
    )


def in_fsdp(wish: ParallelWish, model: torch.nn.Module) -> torch.nn.Module:
    """The same model, whose parameters are this process's shards (`fully_shard`)."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    device = _device_of(model)
    options: dict[str, Any] = {
        "mesh": mesh_of(wish, device),
        "reshard_after_forward": wish.reshard != "none",
        "mp_policy": MixedPrecisionPolicy(),
    }
    if wish.dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=getattr(torch, wish.dtype), reduce_dtype=torch.float32
        )
    if wish.on_host:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device != "cpu")
    for stack in layer_stacks(model):
        for layer in stack:
            fully_shard(layer, **options)
    fully_shard(model, **options | {"reshard_after_forward": wish.reshard == "all"})
    return model


def sharded_optimizer(wish: OptimizerWish, groups: Any, **numbers: Any) -> torch.optim.Optimizer:
    """The optimizer, whose states are spread over the processes; numbers that the recipe has chosen win over
    these."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    kind: Any = wish.factory.resolve()
    return ZeroRedundancyOptimizer(groups, kind, **{**numbers, **wish.factory.arguments})


def _device_of(model: torch.nn.Module) -> str:
    """The kind of device that this process computes on, while the model may wait on the host."""
    import torch.distributed as dist

    kind = next(model.parameters()).device.type
    return "cuda" if kind == "cpu" and "nccl" in str(dist.get_backend_config()) else kind


def mesh_of(wish: ParallelWish, device: str) -> DeviceMesh:
    """The processes in one row, or in as many rows as there are copies of the weights."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    ranks = dist.get_world_size()
    shards = wish.shards or ranks
    if shards == ranks:
        return init_device_mesh(device, (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(device, (ranks // shards, shards), mesh_dim_names=("replicate", "shard"))
