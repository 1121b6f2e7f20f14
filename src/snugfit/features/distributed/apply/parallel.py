"""Handler of the field `parallel`: several processes train one model by torch's own DDP and FSDP2.

Each process (a rank) builds the model whole, on its own GPU. Then it drops the other ranks' parts, or
exchanges its gradients. torch's default process group, which the launcher has made, lists the processes.
Weights are the same in all of them since all begin with one seed.

Sharded weights form groups: each repeated layer is one, and the rest of the model one more, as in torch's
tutorials and torchtitan.

A script of torch's repeats `parallel.py`, line by line. accelerate and the Trainer shard a model by code of
their own, which their files configure. The comments there come from `ACCELERATE_S_FSDP`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from snugfit.errors import UsageError
from snugfit.features.distributed.apply import ring_attention
from snugfit.features.distributed.apply.adjacent_shards import adjacent_weights, change_gathering
from snugfit.features.distributed.apply.by_accelerate import WHOLE_4_BIT, WHOLE_8_BIT, AccelerateHandler
from snugfit.features.distributed.apply.eight_bit_shards import EIGHT_BIT, on_shards
from snugfit.features.distributed.apply.meshes import split
from snugfit.features.distributed.apply.rank_mesh import data_mesh, device_of, mesh, mesh_of, with_contexts
from snugfit.features.distributed.apply.ring_attention import cut_batch
from snugfit.features.distributed.apply.stages import keep_stage, parts_of
from snugfit.features.distributed.apply.tensor import in_tensor_parts, sum_parts_of_gradients
from snugfit.features.distributed.fields import PARALLEL, ParallelWish
from snugfit.features.distributed.techniques.several_gpus import KNOW_SHARDS, is_quantized
from snugfit.step.checkpointing import layer_names, layer_stacks
from snugfit.step.wishes.handler import STAYS, Context, ScriptContext, all_of
from snugfit.step.wishes.precision import MIXED
from snugfit.step.wishes.python_text import CallText, keywords_text
from snugfit.techniques.feature import InstallStage
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from snugfit.job.job import Job
    from snugfit.step.step import StepPasses
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.setup import OptimizerWish

LIVE = (
    "a live model is not spread over several GPUs. `snugfit train` does it; and a script with fit that "
    "torchrun starts trains by the Trainer's own DDP or FSDP2"
)


class ParallelHandler(AccelerateHandler):
    """Handler of the field `parallel`: it distributes the model over processes, of which this one
    is a rank.
    """

    wish, slot, stage = PARALLEL.name, Slot.SHARDING, InstallStage.DISTRIBUTE
    refused: ClassVar = {
        "fit": LIVE,
        "custom_loop": LIVE,
    }

    def import_code(self, value: ParallelWish) -> None:
        """Import torch's code for several processes before a measurement starts, so that the import is not
        measured.
        """
        import torch.distributed.fsdp
        import torch.distributed.optim
        import torch.distributed.pipelining
        import torch.nn.parallel  # noqa: F401

    def model_arguments(self, value: ParallelWish) -> dict[str, Any]:
        """Register ring attention (sequences cut over ranks) in transformers, so that the model's constructor
        finds it by name. Return no arguments.
        """
        if value.context > 1:
            ring_attention.register()
        return {}

    def replace_model(self, value: ParallelWish, model: Any) -> Any:
        """Return the model without the layers of other pipeline stages."""
        return keep_stage(value, model) if value.stages > 1 else model

    def built_on(self, value: ParallelWish, job: Job) -> str:
        """Return the device on which the model is built. `stays` means the host, from which each process
        copies only its shards to its GPU. An empty text means the default device.
        """
        builds_there = job.build_on == "host" and value.tensor == value.stages == 1
        if value.weights == "sharded" and (value.on_host or builds_there):
            return STAYS
        # A model with pipeline stages is divided on the host.
        return "host" if value.stages > 1 else ""

    def make_optimizer(
        self, value: ParallelWish, wish: OptimizerWish, model: Any, groups: Any, **numbers: Any
    ) -> torch.optim.Optimizer | None:
        """Return the optimizer of this process's pipeline stages, or one with sharded states; None if the
        recipe's usual optimizer is built.
        """
        if wish.prepare and model is not None:
            wish.prepare.run(model)
        groups = optimizer_groups(groups)
        kind: Any = wish.factory.resolve()
        if value.states == "sharded":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            kind = functools.partial(ZeroRedundancyOptimizer, optimizer_class=kind)
        elif value.weights == "sharded" and wish.factory.path in EIGHT_BIT:
            kind = on_shards(kind)
        optimizer: torch.optim.Optimizer = kind(groups, **{**numbers, **wish.factory.arguments})
        return optimizer

    def step_passes(
        self,
        value: ParallelWish,
        model: Any,
        runs: Any,
        around: Callable[[], AbstractContextManager[Any]],
    ) -> StepPasses | None:
        """Return the forward and backward passes of this process's pipeline stages; None without pipeline
        parallelism.
        """
        if value.stages == 1:
            return None
        from snugfit.features.distributed.apply.pipeline import StagePasses

        return StagePasses(value, runs, model, around)

    def refuse_training(self, value: ParallelWish, recipe: Recipe) -> None:
        """Raise `UsageError` for optimizers of pipeline stages whose states no checkpoint can hold."""
        if value.stages == 1 or recipe.setup().optimizer_path in KNOW_SHARDS:
            return
        raise UsageError(
            f"{recipe[Slot.OPTIMIZER]}: checkpoints of layers in stages cannot have its states yet, so it is "
            "only predicted and measured. Train with 'adamw', 'adamw_fused' or 'sgd'."
        )

    def distribute(self, value: ParallelWish, model: Any) -> Any:
        """Wrap the model in DDP, or shard its weights over the processes by FSDP2, and return it."""
        # Plain DDP needs no device mesh.
        if value.copies and value.ranks_of_one_part == 1:
            return in_ddp(value, model)
        if value.weights == "alone" and value.tensor == value.context == 1:
            return model
        device = device_of(model)
        mesh = mesh_of(value, device)
        # Matrices are split first, so that FSDP2 shards each rank's part.
        if value.tensor > 1:
            in_tensor_parts(model, mesh["tensor"], experts=value.experts > 1)
        # Ranks that share a sequence hold the same weights, so these are sharded over them too.
        is_sharded = value.weights == "sharded"
        over = mesh_of(with_contexts(value), device) if is_sharded and value.context > 1 else mesh
        # torch's pipelining requires that each stage of this process is wrapped by itself.
        parts = parts_of(value, model) if value.chunks > 1 else {0: model}
        for number, part in parts.items():
            if is_sharded:
                in_fsdp(value, part, data_mesh(over))
            elif value.copies and value.tensor > 1:
                in_replicas(part, data_mesh(mesh))
            elif value.copies:
                group = data_mesh(mesh).get_group() if value.stages > 1 else None
                parts[number] = in_ddp(value, part, group)
        runs = model if value.chunks > 1 else parts[0]
        if is_sharded and value.chunks == 1:
            give_back_whole_weights(device)
        if value.context > 1:
            _SEQUENCES[model] = _SEQUENCES[runs] = mesh["context"]
        return runs

    def around_pass(
        self, value: ParallelWish, model: Any, batch: dict[str, Any], *, is_last: bool
    ) -> Context | None:
        """Return a context for the forward and backward passes of one micro-batch. In it, gradients are
        averaged over GPUs only after the last micro-batch, and sequences are split for context parallelism.
        """
        contexts: list[Context] = []
        if value.weights == "sharded" or (value.copies and value.tensor > 1):
            contexts.append(functools.partial(_fsdp_tells, model, is_last=is_last))
        elif value.copies and not is_last:
            contexts.append(model.no_sync)
        # For norms of single heads, each rank has computed a part of the gradient.
        elif value.tensor > 1 and is_last:
            contexts.append(functools.partial(_parts_are_summed, model))
        if value.context > 1:
            contexts.append(functools.partial(cut_batch, _SEQUENCES[model], model, batch))
        return functools.partial(all_of, contexts) if contexts else None

    def around_evaluation(self, value: ParallelWish, model: Any, batch: dict[str, Any]) -> Context | None:
        """Return a context in which evaluation splits sequences over ranks (context parallelism); None if
        sequences stay whole.
        """
        if value.context == 1:
            return None
        return functools.partial(cut_batch, _SEQUENCES[model], model, batch)

    def after_update(self, value: ParallelWish, model: Any, step: int) -> None:
        """After the first update, free the GPU memory of DDP's first gradient buckets, which NCCL still
        references.
        """
        if value.copies and value.tensor == 1 and step == 0:
            _release_first_buckets(model)

    def after_evaluation(self, value: ParallelWish, model: Any) -> None:
        """Drop the gathered weights that FSDP2 keeps for a backward pass. Until dropped, they replace the
        shards as the model's parameters.
        """
        if value.weights != "alone":
            from torch.distributed.fsdp import FSDPModule

            parts = parts_of(value, model).values() if value.chunks > 1 else [model]
            for module in itertools.chain.from_iterable(part.modules() for part in parts):
                if isinstance(module, FSDPModule):
                    module.reshard()

    def script(self, value: ParallelWish, context: ScriptContext) -> dict[str, Any]:
        """Return values for the template of an exported training script: the code that wraps the model in DDP
        or FSDP2. Raises `RecipeError` for a setting that the script does not support.
        """
        cuts_more = [
            one.slot for one in context.recipe if one.needs_several_gpus and one.slot != Slot.SHARDING
        ]
        if cuts_more:
            raise context.refusal(
                cuts_more[0],
                "a script for several GPUs only shares the batch among them (ddp, fsdp, hsdp, zero1)",
            )
        if value.weights == "sharded" and is_quantized(context.recipe[Slot.ADAPTERS]):
            raise context.refusal(Slot.SHARDING, WHOLE_4_BIT)
        if "sharded" in (value.weights, value.states) and context.setup.optimizer_path in EIGHT_BIT:
            raise context.refusal(Slot.OPTIMIZER, WHOLE_8_BIT)
        if why := _why_not(value, context.target):
            raise context.refusal(Slot.SHARDING, why)
        more: dict[str, Any] = {"mixed": MIXED[value.dtype]} if value.dtype else {}
        if value.states == "sharded":
            factory = context.setup.optimizer.factory
            kind, numbers = factory.path.replace(":", "."), keywords_text(factory.arguments)
            more["optimizer_of_part"] = CallText(
                imported="from torch.distributed.optim import ZeroRedundancyOptimizer",
                called=f"ZeroRedundancyOptimizer(parameters, {kind}, lr=LEARNING_RATE{numbers})",
            )
        shards = value.shards or value.data_ranks
        copies = value.data_ranks // shards
        return more | {
            "parallel": {
                "weights": value.weights,
                "bucket_views": value.bucket_views,
                "mesh": {"shard": shards} if copies == 1 else {"replicate": copies, "shard": shards},
                "imports": _imports(value),
                "reshard": value.reshard,
                "on_host": value.on_host,
                "dtype": f"torch.{value.dtype}" if value.dtype else "",
                "layers": layer_names(context.job) if value.weights == "sharded" else (),
            },
            "note": ACCELERATE_S_FSDP if value.weights == "sharded" and context.target != "torch" else "",
        }


def _release_first_buckets(model: Any) -> None:
    """Release the memory of DDP's first buckets, which DDP replaces in the second step.

    NCCL holds the first buckets until two conditions are met. A thread that polls every 100 ms must find them
    done, and another exchange must begin (`ProcessGroupNCCL`: `shelvesToUnstash_`, `workEnqueue`). So by
    chance the second step had a second set of gradients in memory, or not: 1,278 MiB of BERT-large on two
    H200s. Waiting for that thread, and one exchange, free them at once.
    """
    import torch
    import torch.distributed as dist

    device = next(model.parameters()).device
    if device.type == "cuda":
        dist.group.WORLD._wait_for_pending_works()  # type: ignore[union-attr]
    dist.all_reduce(torch.zeros(1, device=device), async_op=True).wait()


_SEQUENCES: WeakKeyDictionary[torch.nn.Module, DeviceMesh] = WeakKeyDictionary()
"""Device meshes of the ranks that share each sequence. Keys are the model and its wrapper."""


@contextlib.contextmanager
def _fsdp_tells(model: Any, *, is_last: bool) -> Iterator[None]:
    model.set_requires_gradient_sync(is_last)
    yield


@contextlib.contextmanager
def _parts_are_summed(model: Any) -> Iterator[None]:
    yield
    sum_parts_of_gradients(model)


def in_ddp(wish: ParallelWish, model: torch.nn.Module, group: ProcessGroup | None = None) -> torch.nn.Module:
    """Return the model in `DistributedDataParallel`. Its gradients are averaged over a group, by default all
    ranks, bucket by bucket.
    """
    from torch.nn.parallel import DistributedDataParallel

    device = next(model.parameters()).device
    return DistributedDataParallel(
        model,
        process_group=group,
        # On a CPU, DDP takes no device.
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=wish.bucket_views,
    )


def in_replicas(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    """Return the same model, with gradients averaged over `mesh` layer by layer. It uses torch's `replicate`,
    because `DistributedDataParallel` does not support weights that are shards (`DTensor`).
    """
    from torch.distributed._composable.replicate_with_fsdp import replicate

    for stack in layer_stacks(model):
        for layer in stack:
            replicate(layer, mesh=mesh)
    replicate(model, mesh=mesh)
    return model


def in_fsdp(wish: ParallelWish, model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    """Return the same model, with this process's shards over `mesh` as parameters (`fully_shard`)."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    # The last axis of the mesh shards.
    device, ranks = device_of(model), mesh.size(mesh.ndim - 1)
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": wish.reshard != "none",
        "mp_policy": MixedPrecisionPolicy(),
    }
    # Gradients are summed in fp32, as in torchtitan.
    if wish.dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=getattr(torch, wish.dtype), reduce_dtype=torch.float32
        )
    if wish.on_host:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device != "cpu")
    for stack in layer_stacks(model):
        for layer in stack:
            _refuse_two_dtypes(layer)
            runs = adjacent_weights(layer, ranks) if ranks > 1 else []
            fully_shard(layer, **options)
            change_gathering(layer, runs)
    _refuse_two_dtypes(model)
    # The backward pass needs the root's weights first, so they stay unless `reshard` is all.
    fully_shard(model, **options | {"reshard_after_forward": wish.reshard == "all"})
    return model


def _refuse_two_dtypes(group: torch.nn.Module) -> None:
    """Raise `UsageError` for trained weights of several dtypes that FSDP2 would gather together."""
    dtypes = {one.dtype for one in group.parameters() if one.requires_grad and mesh(one) is None}
    if len(dtypes) > 1:
        named = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise UsageError(
            f"FSDP2 shards trained weights of one dtype together, and {type(group).__name__} has {named}. "
            "Adapters are float32. Leave save out, try 'bf16' over weights in float32, or ddp."
        )


def give_back_whole_weights(device: str) -> None:
    """Empty the allocator's cache on a device of this type, after each process has sharded its weights.

    Otherwise blocks of the size of whole layers stay cached, and later requests fill them only in part. More
    would be reserved than by loops that never have whole weights (torchtitan's, dev/several-gpus.md).
    """
    import torch

    if device != "cpu":
        getattr(torch, device).empty_cache()  # `get_device_module` caches the module of an earlier simulation


# ---- exported scripts -------------------------------------------------------------------------------------


ACCELERATE_S_FSDP = (
    "accelerate's FSDP2 makes the embedding a group of its own, and the last norm with the head "
    "another one, which stays gathered after the forward pass. Under bf16 it trains weights in "
    "float32, sums gradients in bf16 and casts the model's output to bf16. snugfit's own loop sums in "
    "float32 and casts no output. So its bytes and losses are those of --loop accelerate or trainer, "
    "not of the plain loop"
)
"""Differences of accelerate's FSDP2 to snugfit's own, as a comment in exported files. Source:
`accelerate.utils.fsdp_utils.fsdp2_prepare_model` and the plugin's `set_mixed_precision` of 1.15.
"""


def _imports(wish: ParallelWish) -> tuple[str, ...]:
    """Return the import lines for the code that distributes the model in an exported script of torch."""
    if wish.weights == "copied":
        return ("from torch.nn.parallel import DistributedDataParallel",)
    names = (*(("CPUOffloadPolicy",) if wish.on_host else ()), "MixedPrecisionPolicy", "fully_shard")
    return (
        "from torch.distributed.device_mesh import init_device_mesh",
        f"from torch.distributed.fsdp import {', '.join(names)}",
    )


def _why_not(wish: ParallelWish, target: str) -> str:
    """Return the reason why no training script can be exported for the training loop `target` and this
    distribution; empty if one can.
    """
    if target == "torch":
        return ""
    if target == "deepspeed":
        return "its steps are not those of DeepSpeed's engine"
    if wish.states == "sharded":
        return "accelerate does not place the states of torch's ZeroRedundancyOptimizer"
    if wish.weights == "sharded" and wish.reshard == "all":
        return "accelerate keeps weights outside of layers gathered until their use. Try reshard=layers"
    return ""


def optimizer_groups(groups: Sequence[Any]) -> list[Any]:
    """Split an optimizer's parameter groups so that all weights of a group are sharded over the same
    ranks."""
    if not groups or not isinstance(groups[0], dict):
        parts = split(groups, mesh)
        return [{"params": part} for part in parts] if len(parts) > 1 else list(groups)
    return [{**group, "params": part} for group in groups for part in split(group["params"], mesh)]
